"""Pages of commands that make several runs: comparisons and phases, with links to their runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from posttrain.viewer.folder_files import content_or, json_number, mapping, parsed_object
from posttrain.viewer.kinds.kind_responses import ComparedCell, ComparedVariant, ComparisonPage, PhaseEntry, PhasesPage
from posttrain.viewer.kinds.run_pictures import pictures_of
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.response_types import Curves, Line, Number
from posttrain.viewer.run_overview import measures, named_numbers

NUMBERS = ("greedy", "pass_at_8", "mean_length", "kl_per_completion", "kl_per_token", "steps", "sampled_tokens")
COSTS = ("training_seconds", "seconds", "peak_memory_bytes")
HEADLINES = ("accuracy_sampled", "score", "reward")
EMPTY: Mapping[str, object] = MappingProxyType({})
NO_LIST: Sequence[object] = ()


def comparison_page(run: OpenedRun, others: Sequence[OpenedRun]) -> ComparisonPage:
    """The table of a comparison; `others` are all open runs."""
    faults: list[str] = []
    content = content_or(EMPTY, run.whole_file("comparison.json", parsed_object, EMPTY).content, faults)
    cells = [mapping(each) for each in as_list(content.get("cells"))]
    measured = [name for name in HEADLINES if any(name in mapping(cell.get("after")) for cell in cells)]
    measure = next(
        (name for name in measured if any(measured_number(cell, "after", name) is not None for cell in cells)), ""
    )
    variants = []
    for each in (mapping(each) for each in as_list(content.get("variants"))):
        name = str(each.get("variant", ""))
        own = [cell for cell in cells if cell.get("variant") == name]
        variants.append(
            ComparedVariant(
                variant=name,
                before=estimate(each.get("before")),
                after=estimate(each.get("after")),
                gain=estimate(each.get("gain_over_first")),
                numbers={
                    key: json_number(each.get(key))
                    for key in (*NUMBERS, *COSTS)
                    if json_number(each.get(key)) is not None
                },
                runs=[compared_cell(run, others, cell, measure) for cell in own],
            )
        )
    return ComparisonPage(
        budget=str(content.get("budget", "")),
        measure=measure,
        variants=variants,
        curves=curves_of(cells, measure),
        pictures=pictures_of(run, "comparison"),
        faults=faults,
    )


def compared_cell(
    run: OpenedRun, others: Sequence[OpenedRun], cell: Mapping[str, object], measure: str
) -> ComparedCell:
    """A run of the comparison, with its number among the open runs."""
    seed = json_number(cell.get("seed"))
    place = run.folder / "cells" / f"{cell.get('variant')}-seed-{seed}"
    return ComparedCell(
        seed=int(seed or 0),
        run=at_folder(others, place),
        before=measured_number(cell, "before", measure),
        after=measured_number(cell, "after", measure),
        steps=json_number(cell.get("steps")),
        seconds=json_number(cell.get("training_seconds")),
        tokens=json_number(cell.get("sampled_tokens")),
        kl=json_number(mapping(cell.get("kl")).get("per_completion")),
    )


def measured_number(cell: Mapping[str, object], when: str, measure: str) -> Number:
    return json_number(mapping(cell.get(when)).get(measure))


def estimate(value: object) -> list[Number]:
    """Mean, low and high; empty if missing."""
    found = mapping(value)
    return [json_number(found.get(name)) for name in ("mean", "low", "high")] if found else []


def curves_of(cells: Sequence[Mapping[str, object]], measure: str) -> list[Curves]:
    """Held-out results against sampled tokens, one line per run."""
    lines = []
    for cell in cells:
        points = [each for each in as_list(cell.get("curve")) if isinstance(each, list) and len(each) == 3]
        steps, values = (
            [int(json_number(point[0]) or 0) for point in points],
            [json_number(point[2]) for point in points],
        )
        name = f"{cell.get('variant')}, seed {cell.get('seed')}"
        lines += [Line(name=name, steps=steps, values=values, low=[], high=[], axis="left")] if points else []
    if not lines:
        return []
    share = measure.startswith("accuracy")
    return [Curves(panel=measure, unit="by tokens sampled", scale="share" if share else "linear", lines=lines)]


def phases_page(run: OpenedRun, others: Sequence[OpenedRun]) -> PhasesPage:
    """The finished phases, then the started ones."""
    faults: list[str] = []
    listed = content_or(NO_LIST, run.whole_file("phases.json", json_list, NO_LIST).content, faults)
    finished = [mapping(each) for each in listed]
    entries = []
    for at, each in enumerate(finished, start=1):
        summary = mapping(each.get("summary"))
        place = run.folder / "phases" / Path(str(each.get("folder", ""))).name
        entries.append(
            PhaseEntry(
                number=at,
                name=str(each.get("name", "")),
                command=str(each.get("command", "")),
                run=at_folder(others, place),
                state="finished",
                steps=json_number(summary.get("steps")),
                seconds=named_numbers(summary.get("seconds")).get("total"),
                measures=measures(summary),
            )
        )
    known = {entry["run"] for entry in entries}
    inside = (run.folder / "phases").resolve()
    for at, other in enumerate(others):
        if at not in known and other.folder.resolve().parent == inside:
            entries.append(begun_phase(at, other, len(entries) + 1))
    return PhasesPage(phases=entries, faults=faults)


def begun_phase(at: int, run: OpenedRun, place: int) -> PhaseEntry:
    """A phase that is not in the report yet."""
    name = run.folder.name.partition("-")[2] or run.folder.name
    return PhaseEntry(
        number=place,
        name=name,
        command=content_or("", run.kind, []),
        run=at,
        state=run.state(),
        steps=run.metrics.tail().last_step,
        seconds=None,
        measures=[],
    )


def at_folder(runs: Sequence[OpenedRun], folder: Path) -> int | None:
    """The number of the open run in a folder."""
    wanted = folder.resolve()
    return next((at for at, run in enumerate(runs) if run.folder.resolve() == wanted), None)


def json_list(content: bytes) -> Sequence[object]:
    """The JSON list in a file.  Raises ValueError."""
    found = json.loads(content)
    if not isinstance(found, list):
        raise ValueError("not a JSON list")
    return found


def as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
