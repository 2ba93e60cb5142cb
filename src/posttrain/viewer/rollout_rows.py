"""Rows of rollout files as tables show them, page by page, filtered and sorted.

Without filter and order a page reads footers and the row groups that it shows.  Otherwise the columns that are asked
about are read file by file, within a time limit for each answer; what was found is kept, and the page asks again.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posttrain.viewer.answer_types import Source
from posttrain.viewer.folder_files import Unreadable, noting, number
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.rollout_answers import RowPage, ShownRollout
from posttrain.viewer.step_files import StepFile, StepFiles

if TYPE_CHECKING:
    import pyarrow as pa

Values = NDArray[Any]
MOST_ROWS = 100
LOOK_SECONDS = 0.25
"""How long an answer looks through files before it says how far it is."""
PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 200, 400
KEPT_SELECTIONS = 16
ROW = ("draw", "sample", "prompt_id", "prompt", "completion", "finish", "reward", "advantage")
EVALUATION = ("evaluation", "greedy", "judged")
PREFIXES = ("score/", "outcome/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQuery:
    """Which rows, and in which order."""

    source: Source = "rollouts"
    step: int | None = None
    outcome: str = ""
    """FUNCTION:OUTCOME, or an outcome of any function."""
    term: str = ""
    """`reward`, `advantage`, `judged` or a reward function: what `low` and `high` bound."""
    low: float | None = None
    high: float | None = None
    length_low: float | None = None
    length_high: float | None = None
    text: str = ""
    """In the completion or the prompt, in any case."""
    evaluation: str = ""
    sort: str = ""
    """A term, `length` or `step`, with `-` before it from high to low."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that choose rows, outcomes apart."""
        ordered = self.sort.removeprefix("-")
        terms = [term_column(each) for each in (self.term, ordered) if each not in ("", "length", "step")]
        texts = ["prompt", "completion"] if self.text else []
        return tuple(dict.fromkeys([*terms, *texts, *(["evaluation"] if self.evaluation else [])]))

    @property
    def chooses(self) -> bool:
        return bool(self.columns or self.outcome or self.sort or self.bounds_length)

    @property
    def bounds_length(self) -> bool:
        return self.length_low is not None or self.length_high is not None


def term_column(term: str) -> str:
    return term if term in ("reward", "advantage", "judged") else f"score/{term}"


@dataclass(slots=True)
class Selection:
    """The rows that a query chose, file by file, as far as was looked."""

    looked_at: int
    keys: list[tuple[int, Values, Values]]
    """Step, rows of its file, and what they are sorted by."""


class RowPages:
    """Pages of rows of one run; keeps what filters found."""

    def __init__(self, run: OpenedRun) -> None:
        self.run = run
        self._selections: OrderedDict[tuple[RowQuery, tuple[int, ...]], Selection] = OrderedDict()

    def page(self, query: RowQuery, offset: int, limit: int) -> RowPage:
        """The rows from `offset` on, at most `limit` of them."""
        faults: list[str] = []
        files = self.run.files(query.source)
        steps = [step for step in files.steps() if query.step in (None, step)]
        opened: dict[int, StepFile] = {}
        for step in steps:
            with noting(faults):
                opened[step] = files.file(step)
        limit = max(1, min(limit, MOST_ROWS))
        total = sum(file.num_rows for file in opened.values())
        if query.chooses:
            selection = self._selected(query, files, opened, faults)
            chosen = ordered_rows(selection, query)
            looked_at, matches = selection.looked_at, len(chosen)
            wanted = chosen[offset : offset + limit]
        else:
            looked_at, matches = len(opened), total
            wanted = rows_between(opened, offset, offset + limit)
        rows: list[ShownRollout] = []
        with noting(faults):
            rows = rows_at(opened, wanted, query.source)
        outcomes, terms = choices(files, opened, faults)
        return RowPage(
            total=total,
            matches=matches,
            offset=offset,
            done=looked_at >= len(opened),
            looked_at=looked_at,
            of_files=len(opened),
            rows=rows,
            outcomes=outcomes,
            terms=terms,
            faults=faults,
        )

    def _selected(
        self, query: RowQuery, files: StepFiles, opened: Mapping[int, StepFile], faults: list[str]
    ) -> Selection:
        key = query, tuple(file.num_rows for file in opened.values())
        selection = self._selections.setdefault(key, Selection(0, []))
        self._selections.move_to_end(key)
        if len(self._selections) > KEPT_SELECTIONS:
            self._selections.popitem(last=False)
        end = monotonic() + LOOK_SECONDS
        for step in [*opened][selection.looked_at :]:
            with noting(faults):
                rows, by = chosen_rows(files, step, query)
                if len(rows):
                    selection.keys.append((step, rows, by))
            selection.looked_at += 1
            if monotonic() > end:
                break
        return selection


def chosen_rows(files: StepFiles, step: int, query: RowQuery) -> tuple[Values, Values]:
    """The rows of a file that match, and what they are sorted by."""
    file = files.file(step)
    told = [name for name in file.columns if name.startswith("outcome/")] if query.outcome else []
    table = file.read([*query.columns, *told]) if query.text else files.kept(step, (*query.columns, *told))
    matching = np.ones(file.num_rows, dtype=bool)
    if query.outcome:
        function, _, outcome = query.outcome.rpartition(":")
        columns = [f"outcome/{function}"] if function else told
        matching &= np.any([equals(table, name, outcome) for name in columns if name in told], axis=0)
    if query.evaluation:
        matching &= equals(table, "evaluation", query.evaluation)
    if query.term:
        matching &= within(numbers_of(table, term_column(query.term)), query.low, query.high)
    if query.bounds_length:
        matching &= within(file.lengths(), query.length_low, query.length_high)
    if query.text:
        matching &= np.any([contains(table, name, query.text) for name in ("prompt", "completion")], axis=0)
    rows = np.flatnonzero(matching)
    ordered = query.sort.removeprefix("-")
    by = rows if ordered in ("", "step") else file.lengths() if ordered == "length" else None
    if by is None:
        by = numbers_of(table, term_column(ordered))
    return rows, by if by is rows else by[rows]


def equals(table: "pa.Table", name: str, text: str) -> Values:
    import pyarrow.compute as compute

    if name not in table.column_names:
        return np.zeros(table.num_rows, dtype=bool)
    return np.asarray(compute.fill_null(compute.equal(table[name], text), False))


def contains(table: "pa.Table", name: str, text: str) -> Values:
    import pyarrow.compute as compute

    found = compute.match_substring(table[name], text, ignore_case=True)
    return np.asarray(compute.fill_null(found, False))


def numbers_of(table: "pa.Table", name: str) -> Values:
    """A column as numbers, NaN where it has none."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table[name].cast("float64").to_numpy())


def within(values: Values, low: float | None, high: float | None) -> Values:
    """Which values lie between the bounds; a value that is missing does not."""
    found = ~np.isnan(values)
    if low is not None:
        found &= values >= low
    if high is not None:
        found &= values <= high
    return found


def ordered_rows(selection: Selection, query: RowQuery) -> list[tuple[int, int]]:
    """(step, row) of what was chosen; missing values come last."""
    if not selection.keys:
        return []
    steps = np.concatenate([np.full(len(rows), step) for step, rows, _ in selection.keys])
    rows = np.concatenate([rows for _, rows, _ in selection.keys])
    if query.sort not in ("", "step"):
        by = np.concatenate([by for *_, by in selection.keys]).astype(float)
        if query.sort == "-step":
            by = steps.astype(float)
        order = np.argsort(-by if query.sort.startswith("-") else by, kind="stable")
        steps, rows = steps[order], rows[order]
    return list(zip(steps.tolist(), rows.tolist(), strict=True))


def rows_between(opened: Mapping[int, StepFile], first: int, last: int) -> list[tuple[int, int]]:
    """(step, row) of the rows of all files in order."""
    found, start = list[tuple[int, int]](), 0
    for step, file in opened.items():
        end = start + file.num_rows
        found += [(step, row - start) for row in range(max(first, start), min(last, end))]
        start = end
    return found


def rows_at(opened: Mapping[int, StepFile], wanted: Sequence[tuple[int, int]], source: Source) -> list[ShownRollout]:
    """The rows at some places, each file read once.  Raises Unreadable."""
    of_step: dict[int, list[int]] = {}
    for step, row in wanted:
        of_step.setdefault(step, []).append(row)
    found: dict[tuple[int, int], ShownRollout] = {}
    for step, rows in of_step.items():
        shown = rows_of(opened[step], rows, source, step)
        found |= {(step, row): each for row, each in zip(rows, shown, strict=True)}
    return [found[place] for place in wanted]


def rows_of(file: StepFile, places: Sequence[int], source: Source, step: int) -> list[ShownRollout]:
    """The rows at some places of a file.  Raises Unreadable."""
    names = [name for name in file.columns if name in (*ROW, *EVALUATION) or name.startswith(PREFIXES)]
    first, count = min(places), max(places) + 1 - min(places)
    rows = file.read(names, first, count).take([place - first for place in places]).to_pylist()
    lengths = file.lengths(first, count)
    return [
        shown_row(row, source, step, whole_length(lengths[place - first]))
        for row, place in zip(rows, places, strict=True)
    ]


def whole_length(length: float) -> int | None:
    return None if np.isnan(length) else int(length)


def shown_row(row: Mapping[str, Any], source: Source, step: int, length: int | None) -> ShownRollout:
    """A row as tables show it."""
    prompt, completion = row["prompt"] or "", row["completion"] or ""
    group, rollout = names_of(row)
    return ShownRollout(
        at=f"{source}/{step}/{group}/{rollout}",
        source=source,
        step=step,
        draw=row["draw"],
        sample=row["sample"],
        group=group,
        rollout=rollout,
        prompt_id=row["prompt_id"] or "",
        prompt=prompt[-PROMPT_CHARACTERS:],
        completion=completion[:COMPLETION_CHARACTERS],
        cut=len(completion) > COMPLETION_CHARACTERS,
        reward=number(row.get("reward")),
        advantage=number(row.get("advantage")),
        finish=row.get("finish") or "",
        length=length,
        outcomes=with_prefix(row, "outcome/", lambda value: value if isinstance(value, str) else ""),
        scores=with_prefix(row, "score/", number),
        judged=number(row.get("judged")),
        evaluation=row.get("evaluation") or "",
        greedy=bool(row.get("greedy")),
    )


def with_prefix(row: Mapping[str, Any], prefix: str, read: Any) -> dict[str, Any]:
    """The columns behind a prefix that have a value."""
    return {
        name.removeprefix(prefix): read(value)
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    }


def names_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """The names of a row's group and of the rollout in it, which together are unique in a file."""
    evaluation = row.get("evaluation")
    group = f"{evaluation}-{row['draw']}" if evaluation else str(row["draw"])
    return group, f"greedy-{row['sample']}" if row.get("greedy") else str(row["sample"])


def choices(files: StepFiles, opened: Mapping[int, StepFile], faults: list[str]) -> tuple[list[str], list[str]]:
    """Outcomes and terms of the last file, which filters offer."""
    if not opened:
        return [], []
    step, file = list(opened.items())[-1]
    told = [name for name in file.columns if name.startswith("outcome/")]
    outcomes: list[str] = []
    with noting(faults):
        table = files.kept(step, told)
        outcomes = [
            f"{name.removeprefix('outcome/')}:{each}"
            for name in told
            for each in sorted(filter(None, table[name].unique().to_pylist()))
        ]
    terms = ["reward", *(["advantage"] if "advantage" in file.columns else [])]
    terms += ["judged"] if "judged" in file.columns else []
    return outcomes, terms + [name.removeprefix("score/") for name in file.columns if name.startswith("score/")]


def require_step(files: StepFiles, step: int) -> StepFile:
    """The file of a step that must exist.  Raises Unreadable."""
    if step not in files.steps():
        raise Unreadable(f"{files.folder.name}/step-{step:06d}.parquet", "does not exist")
    return files.file(step)
