"""A run at a glance: its recipe, curves, alarms, and results before and after training."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from posttrain.viewer.folder_files import content_or, json_number, mapping, noting
from posttrain.viewer.metric_curves import MOST_POINTS, curve_panels, outcomes, seconds_by_stage
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import AlarmEntry, KindPage, Link, Measure, Number, Overview, RunEntry, RunVersion
from posttrain.viewer.rollout_rows import PROMPT_CHARACTERS, row_names

NOTHING: Mapping[str, object] = MappingProxyType({})
HEADLINES = ("accuracy_sampled", "score", "reward", "pairs/accuracy", "accuracy", "loss")
"""Names of the main held-out result, in order of preference."""
MEASURES = {
    "accuracy_sampled": ("accuracy, sampled", "share"),
    "accuracy_greedy": ("accuracy, greedy", "share"),
    "pass_at_8": ("pass@8", "share"),
    "score": ("score", ""),
    "reward": ("reward", ""),
    "loss": ("loss", "nats per token"),
    "mean_token_accuracy": ("likeliest token", "share"),
    "accuracy": ("pairs ranked right", "share"),
    "pairs/accuracy": ("pairs ranked right", "share"),
    "pairs/margin": ("margin of pairs", "score"),
    "mean_length": ("mean length", "tokens"),
}
"""Results of summary.json -> label and unit; other results with an interval follow under their own names."""


def run_entry(run: OpenedRun, at: int) -> RunEntry:
    """A run in the list."""
    faults: list[str] = []
    metrics = run.metrics.tail()
    measure = next((name for name in HEADLINES if f"eval/{name}" in metrics.names), "")
    of_run = content_or(NOTHING, lambda: run.section("run"), faults)
    return RunEntry(
        run=at,
        name=run.name,
        folder=str(run.folder),
        kind=content_or("", run.kind, faults),
        state=run.state(),
        last_step=metrics.last_step,
        num_steps=as_whole_number(of_run.get("num_steps")),
        reward=metrics.last("reward"),
        accuracy=metrics.last(f"eval/{measure}"),
        measure=measure,
        changed=run.changed(),
        faults=[*faults, *run.metrics.faults],
    )


def run_version(run: OpenedRun) -> RunVersion:
    return RunVersion(version=run.version(), state=run.state(), last_step=run.metrics.tail().last_step)


def overview(
    run: OpenedRun, at: int, *, part_of: int | None, others: Sequence[int], pages: Sequence[KindPage]
) -> Overview:
    """All that the first page of a run shows.

    It is a part of the comparison or the phases `part_of`, and `others` are the runs that it is compared with.
    """
    metrics = run.metrics.whole()
    entry = run_entry(run, at)
    faults = list(entry["faults"])

    summary = content_or(NOTHING, run.summary.content, faults)
    algorithm, task, model = (
        content_or(NOTHING, partial(run.section, name), faults) for name in ("algorithm", "task", "model")
    )
    if newer := content_or(None, run.supported, faults):
        faults.append(newer)
    alarms = alarm_entries(run, faults)
    return Overview(
        run=at,
        name=run.name,
        folder=str(run.folder),
        kind=entry["kind"],
        state=entry["state"],
        last_step=entry["last_step"],
        num_steps=entry["num_steps"],
        faults=[*faults, *run.alarms.faults, *unreadable_files(run)],
        lacks=lacks(run, entry),
        recipe=content_or("", run.recipe_text.content, faults),
        algorithm=str(algorithm.get("name", "")),
        task=str(task.get("name", "")),
        model=str(model.get("path", "")),
        versions={str(name): str(text) for name, text in mapping(summary.get("versions")).items()},
        machine=machine_of_run(summary),
        seconds=named_numbers(summary.get("seconds")),
        tokens=named_numbers(summary.get("tokens")),
        curves=curve_panels(metrics),
        outcomes=outcomes(metrics),
        seconds_by_stage=seconds_by_stage(metrics),
        alarms=alarms,
        before_after=measures(summary),
        part_of=part_of,
        compared_with=list(others),
        kind_pages=list(pages),
    )


def as_whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def named_numbers(value: object) -> dict[str, Number]:
    """The numbers of a JSON object; a single number is the `total`."""
    if isinstance(value, dict):
        return {str(name): json_number(each) for name, each in value.items() if json_number(each) is not None}
    return {} if json_number(value) is None else {"total": json_number(value)}


def machine_of_run(summary: Mapping[str, object]) -> dict[str, str]:
    found = {"device": summary.get("device"), **mapping(summary.get("machine"))}
    memory = json_number(summary.get("peak_memory_bytes"))
    found |= {} if memory is None else {"peak memory": f"{memory / 1e9:.2f} GB"}
    return {name: str(value) for name, value in found.items() if value is not None}


def lacks(run: OpenedRun, entry: RunEntry) -> list[str]:
    """What is missing in this folder, and why."""
    found = []
    if not (run.folder / "format").is_file() and entry["kind"] == "rl":
        found.append("a folder of format 1, without tokenizer/ and evaluations/, so token boundaries may be missing")
    if entry["state"] == "not begun":
        found.append("the run has not written anything yet")
    elif entry["state"] == "stopped":
        found.append("the run was stopped or killed: there is no summary.json, so results after training are missing")
    elif entry["state"] == "running":
        found.append("the run is still going: results after training appear when it ends")
    if len(run.metrics.steps) > MOST_POINTS:
        found.append(f"curves of more than {MOST_POINTS:,} points show the lowest and the highest of each stretch")
    if entry["kind"] == "rl" and not run.token_columns.steps():
        found.append("token_columns/ was not saved (run.keep_token_columns): no log π, ratio, clipping or KL per token")
    return found


def unreadable_files(run: OpenedRun) -> list[str]:
    """The last file of each folder, which may be damaged if the process was killed or is running."""
    found: list[str] = []
    for files in (run.rollouts, run.evaluations, run.token_columns):
        if steps := files.steps():
            with noting(found):
                files.file(steps[-1])
    return found


def measures(summary: Mapping[str, object]) -> list[Measure]:
    """Numeric results before and after training: known ones first, then those with an interval."""
    before, after = mapping(summary.get("before")), mapping(summary.get("after"))
    ends = [name for name in (*before, *after) if interval(before, name) or interval(after, name)]
    names = [
        name
        for name in MEASURES
        if json_number(before.get(name)) is not None or json_number(after.get(name)) is not None
    ]
    found = []
    for name in dict.fromkeys([*names, *ends]):
        label, unit = MEASURES.get(name, (name.replace("_", " "), ""))
        (low, high), (after_low, after_high) = (interval(of, name) or (None, None) for of in (before, after))
        found.append(
            Measure(
                measure=label,
                name=name,
                before=json_number(before.get(name)),
                before_low=low,
                before_high=high,
                after=json_number(after.get(name)),
                after_low=after_low,
                after_high=after_high,
                unit=unit,
                resting_on=resting_on(after or before, name),
            )
        )
    return found


def interval(results: Mapping[str, object], name: str) -> tuple[Number, Number] | None:
    """The ends of a result's interval: a pair in summaries of RL runs, two numbers in others."""
    pair = results.get(f"{name}_interval")
    low, high = pair if isinstance(pair, list) and len(pair) == 2 else (results.get(f"{name}_low"), None)
    high = results.get(f"{name}_high") if high is None else high
    return None if json_number(low) is None or json_number(high) is None else (json_number(low), json_number(high))


def resting_on(results: Mapping[str, object], name: str) -> str:
    """The problems and completions behind a number; `measured_on`, which older runs lack, has them."""
    sizes = results.get("measured_on")
    size = sizes.get(name) if isinstance(sizes, Mapping) else None
    if isinstance(size, Mapping) and (problems := json_number(size.get("problems"))):
        completions = json_number(size.get("completions")) or 0
        return f"{problems} problems" + (f" × {completions // problems}" if completions > problems else "")
    problems, samples = (json_number(results.get(each)) for each in ("num_problems", "samples_per_problem"))
    if problems is None:
        return ""
    greedy = name == "accuracy_greedy"
    return f"{problems} problems" + (f" × {samples}" if samples is not None and not greedy else "")


NO_LINKS: Sequence[Link] = ()
HELD_OUT, MOST_LINKS = "held-out ", 8
TAIL = 300
"""Characters of a long completion's end in a transcript."""


def alarm_entries(run: OpenedRun, faults: list[str]) -> list[AlarmEntry]:
    """Alarms with the rollouts that they are about."""
    return [
        AlarmEntry(
            step=int(str(record["step"])),
            name=str(record.get("alarm", "")),
            says=str(record.get("says", "")),
            notice=record.get("notice") is True,
            transcript=str(record.get("transcript", "")),
            links=[*content_or(NO_LINKS, partial(links_of_alarm, run, record), faults)],
        )
        for record in run.alarms.records()
    ]


def links_of_alarm(run: OpenedRun, record: Mapping[str, object]) -> Sequence[Link]:
    """The completions that an alarm is about, held-out ones for an alarm about those.  Raises Unreadable."""
    step, evaluation = int(str(record["step"])), record.get("evaluation")
    name = str(record.get("alarm", ""))
    if name.startswith(HELD_OUT) and evaluation is None:
        return held_out_links(run, step, name.removeprefix(HELD_OUT))
    place = f"evaluations/{step}/{evaluation}-" if evaluation in ("before", "brief", "after") else f"rollouts/{step}/"
    return [
        Link(at=f"{place}{draw}/{sample}", label=f"prompt {draw}, completion {sample}")
        for draw, sample in rollouts_of_alarm(run, record)
    ]


def held_out_links(run: OpenedRun, step: int, verdict: str) -> list[Link]:
    """Held-out completions with an outcome, for alarms of earlier versions, which named completions of training."""
    function, _, outcome = verdict.partition(" ")
    if step not in run.evaluations.steps():
        return []
    rows = run.evaluations.kept(step, ("draw", "sample", "evaluation", "greedy", f"outcome/{function}")).to_pylist()
    shown = [row for row in rows if row.get(f"outcome/{function}") == outcome and not row.get("greedy")]
    return [
        Link(at=f"evaluations/{step}/{'/'.join(row_names(row))}", label=f"held-out prompt {row['draw']}")
        for row in shown[:MOST_LINKS]
    ]


def rollouts_of_alarm(run: OpenedRun, record: Mapping[str, object]) -> Sequence[tuple[int, int]]:
    """Draw and sample of each; for earlier versions, the transcript is searched.  Raises Unreadable."""
    about = record.get("rollouts")
    if isinstance(about, list):
        ids = [
            (as_whole_number(mapping(each).get("draw")), as_whole_number(mapping(each).get("sample"))) for each in about
        ]
        return [(draw, sample) for draw, sample in ids if draw is not None and sample is not None]
    transcript, step = record.get("transcript"), int(str(record["step"]))
    if not isinstance(transcript, str) or step not in run.rollouts.steps():
        return []
    rows = run.rollouts.kept(step, ("draw", "sample", "prompt", "completion")).to_pylist()
    shown = [row for row in rows if is_shown(transcript, row["prompt"] or "", row["completion"] or "")]
    return [(row["draw"], row["sample"]) for row in shown[:1]]


def is_shown(transcript: str, prompt: str, completion: str) -> bool:
    return transcript.startswith(f"{prompt.strip()[-PROMPT_CHARACTERS:]}\n") and transcript.endswith(completion[-TAIL:])
