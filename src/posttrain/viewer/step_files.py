"""Parquet files of steps: which exist, how many rows each has, and reading some rows or columns.

Footers are read first; then only the row groups and columns that are needed.
"""

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from posttrain.viewer.folder_files import Stamp, Unreadable, stamp

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

Values = NDArray[Any]
NAME = re.compile(r"step-(\d{6,12})\.parquet")
SCALARS = {
    **dict.fromkeys(("step", "draw", "sample", "weights_version", "update"), "integer"),
    **dict.fromkeys(
        ("prompt_id", "prompt", "prefill", "completion", "finish", "columns", "evaluation", "failure"), "text"
    ),
    **dict.fromkeys(("turn_calls", "outcome", "marks"), "text"),
    **dict.fromkeys(("reward", "advantage", "judged", "score"), "number"),
    "greedy": "truth",
    **dict.fromkeys(("tokens", "prompt_tokens", "sampled", "logprobs", "cut_logprobs"), "list"),
    **dict.fromkeys(("token_advantages", "token_values", "token_rewards", "process_rewards"), "list"),
    **dict.fromkeys(("turn_ends", "turn_given", "turn_rewards"), "list"),
    **dict.fromkeys(("alternative_tokens", "alternative_logprobs"), "lists"),
}
"""Types of columns, by name or prefix before a slash; a column of another type counts as missing."""
KEPT_FILES = 4096
"""Maximum number of cached footers."""
KEPT_BYTES = 64 << 20
"""Maximum bytes of cached columns."""
MOST_RECENT_BYTES = 8 << 20
"""Maximum bytes of whole row groups that were read recently."""


class RecentTables:
    """Row groups of a folder that were read recently: pages about one group read the same ones again and again."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[StepFile, tuple[int, ...]], pa.Table] = OrderedDict()
        self._bytes = 0

    def find(self, file: "StepFile", groups: Sequence[int], names: Sequence[str]) -> "pa.Table | None":
        """These columns of some row groups; None if they are not held."""
        table = self._held.get((file, tuple(groups)))
        if table is None or not {*names} <= {*table.column_names}:
            return None
        self._held.move_to_end((file, tuple(groups)))
        return table.select(names)

    def hold(self, file: "StepFile", groups: Sequence[int], table: "pa.Table") -> None:
        """Keep a table in place of one with fewer columns; the oldest ones make room."""
        replaced = self._held.pop((file, tuple(groups)), None)
        self._bytes += table.nbytes - (0 if replaced is None else replaced.nbytes)
        self._held[file, tuple(groups)] = table
        while self._bytes > MOST_RECENT_BYTES:
            self._bytes -= self._held.popitem(last=False)[1].nbytes


class StepFile:
    """One Parquet file."""

    def __init__(self, path: Path, label: str, version: Stamp, recent: RecentTables) -> None:
        self.path, self.label, self.version, self._recent = path, label, version, recent
        self.read_groups: set[int] = set()
        """Row groups that pages needed so far."""
        self._lengths: dict[int, Values] = {}
        file = self._open()
        schema, self.num_rows = file.schema_arrow, file.metadata.num_rows
        counts = [file.metadata.row_group(each).num_rows for each in range(file.metadata.num_row_groups)]
        self.starts = [0, *accumulate(counts)]
        self.columns = tuple(each.name for each in schema if has_its_type(each) and schema.names.count(each.name) == 1)
        file.close()

    def _open(self) -> "pq.ParquetFile":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path)  # not mapped: a file that is cut while it is read would kill the process
        except (pa.ArrowException, OSError) as error:
            raise Unreadable(self.label, f"damaged, or still being written ({first_line(error)})") from error

    def require(self, *names: str) -> None:
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise Unreadable(self.label, f"the column `{missing[0]}` is missing or of another type")

    def read(self, names: Sequence[str], first: int = 0, count: int | None = None) -> "pa.Table":
        """Some rows, with those of the columns that the file has."""
        last = self.num_rows if count is None else min(first + count, self.num_rows)
        groups = self._groups(first, last)
        table = self._read_groups(groups, names)
        skipped = first - self.starts[groups[0]] if groups else 0
        return table.slice(skipped, max(0, last - first))

    def read_rows(self, names: Sequence[str], places: Sequence[int]) -> tuple["pa.Table", "Values"]:
        """Single rows with their lengths; only row groups with one of them are read."""
        import pyarrow as pa

        groups = sorted({bisect_right(self.starts, place) - 1 for place in places})
        read = [np.arange(self.starts[at], self.starts[at + 1]) for at in groups]
        table = self._read_groups(groups, names)
        if table.num_rows != sum(map(len, read)):
            raise Unreadable(self.label, "was replaced while it was read")
        wanted = np.searchsorted(np.concatenate([np.zeros(0), *read]), places)
        lengths = [self.lengths(int(rows[0]), len(rows)) for rows in read]
        return table.take(pa.array(wanted, "int64")), np.concatenate([np.zeros(0), *lengths])[wanted]

    def lengths(self, first: int = 0, count: int | None = None) -> "Values":
        """Number of sampled tokens of some rows, NaN if unknown; the tokens themselves are not kept."""
        if "logprobs" not in self.columns:
            return np.full(self.num_rows if count is None else count, np.nan)
        last = self.num_rows if count is None else min(first + count, self.num_rows)
        groups = self._groups(first, last)
        for group in groups:
            if group not in self._lengths:
                column = self._read_groups([group], ["logprobs"])["logprobs"]
                lengths = [each for chunk in column.chunks for each in chunk.value_lengths().to_pylist()]
                self._lengths[group] = np.array(lengths, dtype=float)  # None becomes NaN
        skipped = first - self.starts[groups[0]] if groups else 0
        found = np.concatenate([self._lengths[group] for group in groups]) if groups else np.zeros(0)
        return found[skipped : skipped + last - first]

    def _groups(self, first: int, last: int) -> list[int]:
        return [at for at, start in enumerate(self.starts[:-1]) if start < last and self.starts[at + 1] > first]

    def _read_groups(self, groups: Sequence[int], names: Sequence[str]) -> "pa.Table":
        import pyarrow as pa

        wanted = [name for name in names if name in self.columns]
        self.read_groups.update(groups)
        found = self._recent.find(self, groups, wanted)
        if found is not None:
            return found
        try:
            with self._open() as file:
                table = with_valid_texts(file.read_row_groups(groups, columns=wanted, use_threads=False))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Unreadable(self.label, f"damaged ({first_line(error)})") from error
        self._recent.hold(self, groups, table)
        return table


def with_valid_texts(table: "pa.Table") -> "pa.Table":
    """The table; bytes that are not UTF-8, such as half of a surrogate pair, are written out as \\xed."""
    import pyarrow as pa
    import pyarrow.types as kinds

    for at, field in enumerate(table.schema):
        if not (kinds.is_string(field.type) or kinds.is_large_string(field.type)):
            continue
        try:
            table.column(at).validate(full=True)
        except pa.ArrowInvalid:
            raw = table.column(at).cast(pa.large_binary()).to_pylist()
            texts = [None if each is None else each.decode("utf-8", "backslashreplace") for each in raw]
            table = table.set_column(at, field.name, pa.array(texts, field.type))
    return table


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def has_its_type(field: "pa.Field") -> bool:
    """Whether a column has the right type for its name; a column with an unknown name can have any type."""
    import pyarrow.types as kinds

    kind = SCALARS.get(field.name.partition("/")[0])
    if kind is None:
        return True
    tests: dict[str, bool] = {
        "integer": kinds.is_integer(field.type),
        "text": kinds.is_string(field.type) or kinds.is_large_string(field.type),
        "number": kinds.is_floating(field.type) or kinds.is_integer(field.type) or kinds.is_null(field.type),
        "truth": kinds.is_boolean(field.type),
        "list": is_list_of_numbers(field.type),
        "lists": kinds.is_list(field.type) and is_list_of_numbers(field.type.value_type),
    }
    return tests[kind]


def is_list_of_numbers(kind: "pa.DataType") -> bool:
    import pyarrow.types as kinds

    if not (kinds.is_list(kind) or kinds.is_large_list(kind)):
        return False
    held = kind.value_type
    return bool(kinds.is_integer(held) or kinds.is_floating(held) or kinds.is_boolean(held) or kinds.is_null(held))


class StepFiles:
    """The files of a folder such as `rollouts`, by step."""

    def __init__(self, folder: Path, needed: Sequence[str] = ("draw", "sample", "prompt_id", "prompt", "completion")):
        self.folder, self.needed = folder, needed
        self._files: dict[int, tuple[Stamp, StepFile | Unreadable]] = {}
        self._columns: OrderedDict[tuple[int, Stamp, tuple[str, ...]], pa.Table] = OrderedDict()
        self._kept_bytes = 0
        self._recent = RecentTables()

    def steps(self) -> list[int]:
        """Steps with a file, in order."""
        try:
            names = [NAME.fullmatch(each.name) for each in self.folder.iterdir()]
        except OSError:
            return []
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.parquet"

    def file(self, step: int) -> StepFile:
        """The file of a step.  Raises Unreadable if it is missing or damaged."""
        path, label = self.path(step), f"{self.folder.name}/{self.path(step).name}"
        now = stamp(path)
        if now is None:
            raise Unreadable(label, "does not exist")
        known = self._files.get(step)
        if known is None or known[0] != now:
            if len(self._files) > KEPT_FILES:
                self._files.clear()
            known = self._files[step] = now, self._opened(path, label, now)
        if isinstance(known[1], Unreadable):
            raise known[1]
        return known[1]

    def _opened(self, path: Path, label: str, version: Stamp) -> StepFile | Unreadable:
        try:
            file = StepFile(path, label, version, self._recent)
            file.require(*self.needed)
        except Unreadable as fault:
            return fault
        return file

    def kept(self, step: int, names: Sequence[str]) -> "pa.Table":
        """Columns of a whole file, cached for the next request."""
        file = self.file(step)
        key = step, self._files[step][0], tuple(names)
        if key in self._columns:
            self._columns.move_to_end(key)
            return self._columns[key]
        table = self._columns[key] = file.read(names)
        self._kept_bytes += table.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._columns) > 1:
            self._kept_bytes -= self._columns.popitem(last=False)[1].nbytes
        return table

    def readable(self, faults: list[str]) -> Iterator[tuple[int, StepFile]]:
        """The readable files, in order; unreadable ones are noted."""
        for step in self.steps():
            try:
                yield step, self.file(step)
            except Unreadable as fault:
                faults.append(str(fault))
