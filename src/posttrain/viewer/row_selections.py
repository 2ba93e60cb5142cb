"""Which rows of rollout files match a query, and in which order.

What was found is kept by the version of each file: a file that is replaced is looked through again, the others are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posttrain.viewer.folder_files import Stamp, Unreadable
from posttrain.viewer.response_types import Source
from posttrain.viewer.step_files import StepFile, StepFiles

if TYPE_CHECKING:
    import pyarrow as pa

Values = NDArray[Any]
LOOK_SECONDS = 0.25
"""How long a response looks through files before it says how far it is."""
SAMPLINGS = {"greedy": True, "sampled": False}
TERMS = ("reward", "advantage", "judged")
"""Numbers of a row that are not scores of a reward function."""


class WrongQuery(Exception):
    """A query with a value that its field does not have."""


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
    sampling: str = ""
    """`greedy` or `sampled`."""
    sort: str = ""
    """A term, `length` or `step`, with `-` before it from high to low."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that choose rows, outcomes apart."""
        ordered = self.sort.removeprefix("-")
        terms = [term_column(each) for each in (self.term, ordered) if each not in ("", "length", "step")]
        texts = ["prompt", "completion"] if self.text else []
        named = [name for name, asked in (("evaluation", self.evaluation), ("greedy", self.sampling)) if asked]
        return tuple(dict.fromkeys([*terms, *texts, *named]))

    @property
    def chooses(self) -> bool:
        return bool(self.columns or self.outcome or self.sort or self.bounds_length)

    @property
    def bounds_length(self) -> bool:
        return self.length_low is not None or self.length_high is not None


def term_column(term: str) -> str:
    return term if term in ("reward", "advantage", "judged") else f"score/{term}"


@dataclass(frozen=True, slots=True)
class FoundRows:
    """The rows of one file that match."""

    version: Stamp
    """Of the file."""
    rows: Values
    by: Values
    """What they are sorted by."""
    fault: str = ""
    """Why the file could not be read."""


@dataclass(slots=True)
class Selection:
    """The rows that a query chose, as far as files were looked through."""

    query: RowQuery
    found: dict[int, FoundRows] = field(default_factory=dict)
    """By step."""
    order: tuple[Values, Values] | None = None
    """Steps and rows in the query's order, until `found` changes."""

    def look(self, files: StepFiles, opened: Mapping[int, StepFile]) -> None:
        """Look through files that are new or replaced, for a limited time."""
        versions = {step: file.version for step, file in opened.items()}
        for step in [step for step, known in self.found.items() if versions.get(step) != known.version]:
            del self.found[step]
            self.order = None
        end = monotonic() + LOOK_SECONDS
        for step, file in opened.items():
            if step in self.found:
                continue
            try:
                self.found[step] = FoundRows(file.version, *selected_rows(files, step, self.query))
            except Unreadable as fault:
                self.found[step] = FoundRows(file.version, np.zeros(0, dtype=int), np.zeros(0), str(fault))
            self.order = None
            if monotonic() > end:
                break

    @property
    def faults(self) -> list[str]:
        return [each.fault for each in self.found.values() if each.fault]

    def ordered(self) -> tuple[Values, Values]:
        """Steps and rows of what was chosen; missing values come last."""
        if self.order is None:
            self.order = self._ordered()
        return self.order

    def _ordered(self) -> tuple[Values, Values]:
        found = [(step, self.found[step]) for step in sorted(self.found)]
        if not found:
            return np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        steps = np.concatenate([np.full(len(each.rows), step) for step, each in found])
        rows = np.concatenate([each.rows for _, each in found])
        sort = self.query.sort
        if sort not in ("", "step"):
            by = steps if sort == "-step" else np.concatenate([each.by for _, each in found])
            order = np.argsort(-by.astype(float) if sort.startswith("-") else by.astype(float), kind="stable")
            steps, rows = steps[order], rows[order]
        return steps, rows


def require_terms(query: RowQuery, opened: Mapping[int, StepFile]) -> None:
    """Raises WrongQuery for a term or an order that no file has, or an unknown sampling."""
    if query.sampling and query.sampling not in SAMPLINGS:
        raise WrongQuery(f"sampling = {query.sampling[:40]!r}: must be {' or '.join(SAMPLINGS)}")
    ordered = query.sort.removeprefix("-")
    for name, term in (("term", query.term), ("sort", "" if ordered in ("length", "step") else ordered)):
        known = not term or term in TERMS or any(f"score/{term}" in file.columns for file in opened.values())
        if opened and not known:
            more = ", length or step" if name == "sort" else ""
            raise WrongQuery(f"{name} = {term[:40]!r}: must be {', '.join(TERMS)}, a reward function{more}")


def selected_rows(files: StepFiles, step: int, query: RowQuery) -> tuple[Values, Values]:
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
    if query.sampling:
        matching &= equals(table, "greedy", True) == SAMPLINGS[query.sampling]
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


def equals(table: "pa.Table", name: str, value: str | bool) -> Values:
    import pyarrow.compute as compute

    if name not in table.column_names:
        return np.zeros(table.num_rows, dtype=bool)
    return np.asarray(compute.fill_null(compute.equal(table[name], value), False))


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
