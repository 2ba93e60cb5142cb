"""One problem over training: when each was asked, and its completions at every step."""

from collections.abc import Sequence
from statistics import fmean

from posttrain.viewer.folder_files import json_number, noting
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.problem_responses import Asked, ProblemEntry, ProblemList, ProblemPage, ProblemStep
from posttrain.viewer.response_types import Source
from posttrain.viewer.rollout_rows import PROMPT_CHARACTERS, row_names, rows_of
from posttrain.viewer.step_files import StepFile
from posttrain.viewer.step_pages import rows_by_group

COLUMNS = ("draw", "sample", "prompt_id", "reward", "judged", "evaluation", "greedy")
MOST_PROBLEMS = 1000
SOURCES: tuple[Source, ...] = ("rollouts", "evaluations")


class ProblemIndex:
    """Which problem was asked where; a file's content is cached until the file changes."""

    def __init__(self, run: OpenedRun) -> None:
        self.run = run
        self._of_file: dict[tuple[Source, int], tuple[StepFile, dict[str, tuple[str, list[Asked]]]]] = {}

    def listed(self, text: str) -> ProblemList:
        """Problems whose id or prompt contains a text, most frequently asked first."""
        faults: list[str] = []
        entries: dict[str, ProblemEntry] = {}
        for source in SOURCES:
            for step in self.run.files(source).steps():
                with noting(faults):
                    for name, (prompt, asked) in self._in_file(source, step).items():
                        entry = entries.setdefault(name, ProblemEntry(prompt_id=name, prompt=prompt, asked=[]))
                        entry["asked"] += asked
        found = [each for each in entries.values() if text.lower() in f"{each['prompt_id']}\n{each['prompt']}".lower()]
        found.sort(key=lambda each: -len(each["asked"]))
        return ProblemList(problems=found[:MOST_PROBLEMS], total=len(found), faults=faults)

    def page(self, name: str) -> ProblemPage | None:
        """All completions of a problem, step by step; None if it was never asked."""
        faults: list[str] = []
        steps: list[ProblemStep] = []
        columns, text = "", ""
        for source in SOURCES:
            files = self.run.files(source)
            for step in files.steps():
                with noting(faults):
                    if name not in self._in_file(source, step):
                        continue
                    file = files.file(step)
                    ids = [each or "" for each in files.kept(step, ("prompt_id",))["prompt_id"].to_pylist()]
                    places = [place for place, each in enumerate(ids) if each == name]
                    rows = rows_of(file, places, source, step)
                    evaluations = list(dict.fromkeys(row["evaluation"] for row in rows))
                    steps += [
                        ProblemStep(
                            step=step,
                            source=source,
                            evaluation=evaluation,
                            rows=[row for row in rows if row["evaluation"] == evaluation],
                        )
                        for evaluation in evaluations
                    ]
                    if not text:
                        [whole] = file.read(["prompt", "columns"], places[0], 1).to_pylist()
                        text, columns = whole["prompt"] or "", whole.get("columns") or ""
        if not steps:
            return None
        steps.sort(key=lambda each: each["step"])
        return ProblemPage(prompt_id=name, prompt=text, columns=columns, steps=steps, faults=faults)

    def _in_file(self, source: Source, step: int) -> dict[str, tuple[str, list[Asked]]]:
        """The problems in a file: the end of the prompt, and the scores of its groups.  Raises Unreadable."""
        file = self.run.files(source).file(step)
        known = self._of_file.get((source, step))
        if known is None or known[0] is not file:
            known = self._of_file[source, step] = file, asked_in(file, source, step)
        return known[1]


def asked_in(file: StepFile, source: Source, step: int) -> dict[str, tuple[str, list[Asked]]]:
    """The problems in a file, group by group."""
    import pyarrow as pa

    rows = [{**row, "place": place} for place, row in enumerate(file.read(COLUMNS).to_pylist())]
    groups = list(rows_by_group([row for row in rows if not row.get("greedy")]).values())
    places = [of_group[0]["place"] for of_group in groups]
    prompts = file.read(["prompt"])["prompt"].take(pa.array(places, "int64")).to_pylist()
    found: dict[str, tuple[str, list[Asked]]] = {}
    for of_group, prompt in zip(groups, prompts, strict=True):
        rewards = [json_number(row.get("reward")) for row in of_group]
        judged = [json_number(row.get("judged")) for row in of_group] if source == "evaluations" else rewards
        asked = Asked(
            step=step,
            source=source,
            evaluation=of_group[0].get("evaluation") or "",
            reward=mean_of(rewards),
            solved=mean_of([None if each is None else float(each >= 1) for each in judged]),
            group=row_names(of_group[0])[0],
        )
        name = of_group[0]["prompt_id"] or ""
        found.setdefault(name, ((prompt or "")[-PROMPT_CHARACTERS:], []))[1].append(asked)
    return found


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return fmean(known) if known else None
