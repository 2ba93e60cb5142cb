"""Held-out problems of a run before, along the way and after training, and of two runs side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.viewer.folder_files import noting
from posttrain.viewer.metric_curves import curve_panels
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.paired_test import Right, sign_flip_p_value
from posttrain.viewer.problem_responses import (
    ComparedProblem,
    ComparedRuns,
    HeldOutEvaluation,
    HeldOutPage,
    HeldOutProblem,
)
from posttrain.viewer.response_types import Curves
from posttrain.viewer.rollout_rows import PROMPT_CHARACTERS
from posttrain.viewer.run_overview import run_entry

COLUMNS = ("draw", "prompt_id", "sample", "evaluation", "greedy", "judged")
Change = Literal["solved", "lost", "always", "unsolved", "never", ""]


@dataclass(frozen=True, slots=True)
class MeasuredProblem:
    """One problem in one evaluation."""

    at: str
    right: Right

    @property
    def share(self) -> float:
        return self.right[0] / self.right[1]


@dataclass(frozen=True, slots=True)
class HeldOutResults:
    """One evaluation at temperature 1, problem by problem; problems without a score are left out."""

    step: int
    name: str
    problems: Mapping[str, MeasuredProblem]


def results_of(run: OpenedRun, faults: list[str]) -> tuple[list[HeldOutResults], dict[str, str]]:
    """All evaluations in order, and the text of each problem."""
    found: list[HeldOutResults] = []
    prompts: dict[str, str] = {}
    for step, _ in run.evaluations.readable(faults):
        with noting(faults):
            run.evaluations.file(step).require(*COLUMNS)
            rows = run.evaluations.kept(step, COLUMNS).to_pylist()
            first: dict[str, int] = {}
            for place, row in enumerate(rows):
                first.setdefault(row["prompt_id"] or "", place)
            new = [each for each in first if each not in prompts]
            if new:
                texts = run.evaluations.file(step).read(["prompt"])["prompt"].take([first[each] for each in new])
                prompts |= dict(zip(new, texts.to_pylist(), strict=True))
            names = dict.fromkeys(row["evaluation"] for row in rows if not row["greedy"])
            found += [HeldOutResults(step, name, measured(rows, step, name)) for name in names]
    return found, prompts


def measured(rows: Sequence[Mapping[str, Any]], step: int, evaluation: str) -> dict[str, MeasuredProblem]:
    """The problems of an evaluation, by as many completions of each: some have more, for pass@8."""
    sampled = [row for row in rows if row["evaluation"] == evaluation and not row["greedy"]]
    held: dict[str, int] = {}
    for row in sampled:
        name = row["prompt_id"] or ""
        held[name] = max(held.get(name, 0), 1 + (row["sample"] or 0))
    common = min(held.values(), default=0)
    judged: dict[str, list[float]] = {}
    draws: dict[str, int] = {}
    for row in sampled:
        if row["judged"] is not None and (row["sample"] or 0) < common:
            judged.setdefault(row["prompt_id"] or "", []).append(row["judged"])
            draws[row["prompt_id"] or ""] = row["draw"]
    return {
        name: MeasuredProblem(
            at=f"evaluations/{step}/{evaluation}-{draws[name]}", right=(sum(each >= 1 for each in scores), len(scores))
        )
        for name, scores in judged.items()
    }


def full(results: Sequence[HeldOutResults], name: str) -> HeldOutResults | None:
    return next((each for each in reversed(results) if each.name == name), None)


def held_out_page(run: OpenedRun) -> HeldOutPage:
    """Held-out problems one by one, and how each changed."""
    faults: list[str] = []
    results, prompts = results_of(run, faults)
    before, after = full(results, "before"), full(results, "after")
    along = [each for each in results if each.name not in ("before", "after")]
    shown = [held_out_problem(name, prompts, results, (before, along, after)) for name in prompts]
    changes = [each["change"] for each in shown]
    p_value, says = None, ""
    if before is not None and after is not None:
        p_value, says = evaluation_difference("before training", before, "after training", after)
    return HeldOutPage(
        evaluations=[evaluation_entry(run, each) for each in results],
        problems=sorted(shown, key=lambda each: ORDER.index(each["change"])),
        counts={each: changes.count(each) for each in ORDER if each},
        p_value=p_value,
        says=says,
        faults=faults,
    )


ORDER: tuple[Change, ...] = ("solved", "lost", "always", "unsolved", "never", "")


def held_out_problem(
    name: str,
    prompts: Mapping[str, str],
    results: Sequence[HeldOutResults],
    parts: tuple[HeldOutResults | None, Sequence[HeldOutResults], HeldOutResults | None],
) -> HeldOutProblem:
    """A problem in each evaluation."""
    before, along, after = parts
    first, last = share(before, name), share(after, name)
    ever = any(each.problems[name].right[0] for each in results if name in each.problems)
    links = {
        each.name if each.name in ("before", "after") else str(each.step): each.problems[name].at
        for each in results
        if name in each.problems
    }
    return HeldOutProblem(
        prompt_id=name,
        prompt=(prompts[name] or "")[-PROMPT_CHARACTERS:],
        before=first,
        along=[share(each, name) for each in along],
        after=last,
        change=change(first, last, ever=ever),
        links=links,
    )


def share(results: HeldOutResults | None, name: str) -> float | None:
    return None if results is None or name not in results.problems else results.problems[name].share


def change(before: float | None, after: float | None, *, ever: bool) -> Change:
    """A problem is solved where more than half of its completions are right; `ever`: one was right in any evaluation.

    Without `ever` it was never solved; `unsolved` means neither before nor after training.
    """
    if before is None or after is None:
        return ""
    table: dict[tuple[bool, bool], Change] = {
        (False, True): "solved",
        (True, False): "lost",
        (True, True): "always",
        (False, False): "unsolved" if ever else "never",
    }
    return table[before > 0.5, after > 0.5]


def evaluation_entry(run: OpenedRun, results: HeldOutResults) -> HeldOutEvaluation:
    """An evaluation with its mean; the interval is that of metrics.jsonl, whose last line of a step counts."""
    shares = [each.share for each in results.problems.values()]
    lines = run.metrics.whole().of_step(results.step)
    line = {} if not lines else lines[-1] if results.name == "after" else lines[0]
    low, high = (line.get(f"eval/accuracy_sampled_{end}") for end in ("low", "high"))
    return HeldOutEvaluation(
        step=results.step,
        name=results.name,
        accuracy=sum(shares) / len(shares) if shares else None,
        low=low,
        high=high,
        problems=len(shares),
    )


def evaluation_difference(name_a: str, a: HeldOutResults, name_b: str, b: HeldOutResults) -> tuple[float | None, str]:
    """The p-value of the difference of two evaluations on their common problems, and a sentence."""
    both = [name for name in a.problems if name in b.problems]
    if not both:
        return None, "The two runs have no common problems."
    rights_a, rights_b = ([each.problems[name].right for name in both] for each in (a, b))
    means = [sum(right / count for right, count in rights) / len(both) for rights in (rights_a, rights_b)]
    p_value = sign_flip_p_value(rights_a, rights_b)
    shown = f"{means[0]:.1%} of completions are right {name_a}, {means[1]:.1%} {name_b}"
    tested = "too many answers for the exact test" if p_value is None else p_text(p_value)
    return p_value, f"On {len(both)} problems, {shown}. {tested}."


def p_text(p_value: float) -> str:
    """A p-value in words."""
    shown = "p < 0.0001" if p_value < 0.0001 else f"p = {p_value:.2g}"
    cases = "fewer than 0.01%" if p_value < 0.0001 else f"{100 * p_value:.2g}%" if p_value < 0.995 else "nearly all"
    return f"Exact paired sign-flip test: {shown}; chance alone gives a difference this large in {cases} of cases"


def compared_runs(a: OpenedRun, b: OpenedRun, places: tuple[int, int]) -> ComparedRuns:
    """Two runs problem by problem, by their last full evaluation."""
    faults: list[str] = []
    (results_a, prompts), (results_b, more) = results_of(a, faults), results_of(b, faults)
    last_a, last_b = (full(each, "after") or (each[-1] if each else None) for each in (results_a, results_b))
    problems: list[ComparedProblem] = []
    p_value, says = (
        None,
        "One of the runs does not have an evaluation with completions, so problems cannot be compared.",
    )
    if last_a is not None and last_b is not None:
        p_value, says = evaluation_difference(f"in {a.name}", last_a, f"in {b.name}", last_b)
        texts = more | prompts
        common = [name for name in last_a.problems if name in last_b.problems]
        problems = [compared_problem(name, texts, last_a, last_b) for name in common]
    solved = [(each["a"] > 0.5, each["b"] > 0.5) for each in problems]
    return ComparedRuns(
        a=run_entry(a, places[0]),
        b=run_entry(b, places[1]),
        problems=sorted(problems, key=lambda each: each["a"] - each["b"]),
        only_a=solved.count((True, False)),
        only_b=solved.count((False, True)),
        both=solved.count((True, True)),
        neither=solved.count((False, False)),
        p_value=p_value,
        says=says,
        curves=common_panels(a, b),
        faults=faults,
    )


def compared_problem(name: str, prompts: Mapping[str, str], a: HeldOutResults, b: HeldOutResults) -> ComparedProblem:
    of_a, of_b = a.problems[name], b.problems[name]
    prompt = (prompts[name] or "")[-PROMPT_CHARACTERS:]
    return ComparedProblem(prompt_id=name, prompt=prompt, a=of_a.share, b=of_b.share, at_a=of_a.at, at_b=of_b.at)


def common_panels(a: OpenedRun, b: OpenedRun) -> list[Curves]:
    """The panels of both runs on one axis, each line with the name of its run."""
    found: dict[str, Curves] = {}
    for run in (a, b):
        for panel in curve_panels(run.metrics.whole()):
            named = [{**line, "name": f"{line['name']}, {run.name}"} for line in panel["lines"]]
            kept = found.setdefault(panel["panel"], {**panel, "lines": []})
            kept["lines"] += named  # type: ignore[arg-type]
    return [*found.values()]
