"""Rows of data, each with the place it came from; every fault is reported by that place."""

import difflib
import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

from posttrain.binding import digest_of
from posttrain.errors import UserError
from posttrain.options.dataset import RowSourceOptions
from posttrain.schemas import did_you_mean
from posttrain.tasks.row_files import file_rows
from posttrain.tasks.row_files.file_rows import Found, checked_value
from posttrain.tasks.row_files.generator_rows import generated_rows

MEMORY = "rows"
"""The place of rows that come from Python."""
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
COMPRESSED = ".gz"
"""Follows the suffix of a text file that gzip compressed."""
MOST_NAMED = 5
"""Bad rows that a message lists."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row and where to find it."""

    where: str
    """FILE:LINE for JSON lines and CSV, FILE:NUMBER, from 1, for other rows."""
    columns: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRows:
    """Rows of a caller in Python."""

    rows: Iterable[Mapping[str, object]] | None = None
    """In place of the task's file."""
    held_out: Iterable[Mapping[str, object]] | None = None
    """Rows to measure on, in place of a file or a share."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (given := getattr(self, each.name)) is not None:
                object.__setattr__(self, each.name, [*given])  # a generator gives them once


NO_ROWS_GIVEN = GivenRows()


@dataclass(frozen=True, slots=True)
class BadRows:
    """Rows that cannot be used: left out and counted, up to a limit."""

    allowed: int = 0
    faults: list[str] = field(default_factory=list)
    """A message about each, its place first."""

    def add(self, fault: str) -> None:
        """Count a bad row.  Raises UserError if there are more than allowed."""
        self.faults.append(fault)
        if not self.allowed:
            raise UserError(fault)
        if len(self.faults) > self.allowed:
            raise UserError(
                f"at least {len(self.faults)} rows cannot be used; task.skip_bad_rows = {self.allowed}. Correct"
                f" them or allow more. The first:{self.listed()}"
            )

    @contextmanager
    def counting(self, where: str = "") -> Iterator[None]:
        """Inside, a UserError marks a bad row; `where` goes before its message."""
        try:
            yield
        except UserError as error:
            self.add(f"{where}{error}")

    def listed(self) -> str:
        more = [f"and {len(self.faults) - MOST_NAMED} more"] if len(self.faults) > MOST_NAMED else []
        return "".join(f"\n  {line}" for line in [*self.faults[:MOST_NAMED], *more])


def numbered_rows(values: Iterable[object], source: str, bad: BadRows | None = None) -> list[DatasetRow]:
    return checked_rows(iter(enumerate(map(checked_value, values), start=1)), source, bad or BadRows())


def checked_rows(found: Found, source: str, bad: BadRows) -> list[DatasetRow]:
    """The valid rows; the others are counted as bad."""
    rows: list[DatasetRow] = []
    for number, value in found:
        where = f"{source}:{number}"
        if isinstance(value, Mapping):
            rows.append(DatasetRow(where, dict(value)))
        else:
            kind = f"a row must be an object of named columns, not {type(value).__name__}"
            bad.add(f"{where}: {value if isinstance(value, UserError) else kind}")
    if not rows:
        raise UserError(f"{source}: there are no rows; give at least one")
    return rows


def read_rows(
    path: str, source: RowSourceOptions | None = None, bad: BadRows | None = None, *, split: str = ""
) -> list[DatasetRow]:
    """All rows at a path, under the names that the options give the columns; `split` goes before the options' own."""
    source, bad = source or RowSourceOptions(), bad or BadRows()
    split = split or source.split
    if not path and source.generator:
        rows = numbered_rows(generated_rows(source), source.generator, bad)
    else:
        rows = original_rows(path, source, split, bad)
    if not source.columns and not source.json_columns:
        return rows
    kept = []
    for row in rows:
        with bad.counting():
            kept.append(with_columns(row, source))
    return kept


def original_rows(path: str, source: RowSourceOptions, split: str, bad: BadRows) -> list[DatasetRow]:
    """All rows at a path, before columns are renamed."""
    folder, files = Path(path), files_of(path)
    if files:
        for option, value in {"split": split, "subset": source.subset, "revision": source.revision}.items():
            if value:
                raise UserError(f"{path}: {option} = {value} is for data sets on the hub, not files.  Leave it out.")
        return [row for file in files for row in checked_rows(found_in(file, source.delimiter), file.name, bad)]
    if folder.is_dir():
        if not file_rows.is_saved_dataset(folder):
            raise UserError(f"{path}: not saved by `datasets`; give its files as a pattern: {folder / '*.parquet'}")
        return numbered_rows(file_rows.saved_rows(folder, split), folder.name, bad)
    if is_on_hub(path):
        found = file_rows.hub_rows(path, subset=source.subset, split=split, revision=source.revision)
        return numbered_rows(found, path, bad)
    raise UserError(f"{path}: no such file{near_file(folder)}. Paths are relative to the folder you run in.")


def files_of(path: str) -> list[Path]:
    if Path(path).is_file():
        return [Path(path)]
    return [file for name in sorted(glob.glob(path, recursive=True)) if (file := Path(name)).is_file()]


def rows_digest(path: str, revision: str = "") -> str:
    """A hash of the files at a path, or their commit on the hub; "" if unknown."""
    files = files_of(path)
    if len(files) == 1:
        return digest_of(files[0])
    if not files and Path(path).is_dir():
        files = sorted(file for file in Path(path).rglob("*") if file.suffix in (".arrow", ".json"))
    if files:
        listed = "".join(f"{file.name} {digest_of(file)}\n" for file in files)
        return hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()
    return file_rows.hub_commit(path, revision) if is_on_hub(path) else ""


def is_on_hub(path: str) -> bool:
    return bool(file_rows.HUB_NAME.fullmatch(path)) and Path(path).suffix.lower() not in (*SUFFIXES, COMPRESSED)


def found_in(file: Path, delimiter: str) -> Found:
    """The rows of a file, by the suffix of its name."""
    compressed = file.suffix.lower() == COMPRESSED
    match Path(file.stem if compressed else file.name).suffix.lower():
        case ".jsonl":
            return file_rows.json_line_rows(file)
        case ".json":
            return file_rows.json_list_rows(file)
        case ".csv" | ".tsv" as suffix:
            return file_rows.csv_rows(file, delimiter or ("\t" if suffix == ".tsv" else ""))
        case ".parquet" | ".arrow" as suffix if not compressed:
            read = file_rows.parquet_rows if suffix == ".parquet" else file_rows.arrow_rows
            return iter(enumerate(read(file), start=1))
    texts = ", ".join(f"{suffix}{COMPRESSED}" for suffix in SUFFIXES[:4])
    raise UserError(f"{file}: rows are read from {', '.join(SUFFIXES)} and {texts} files; convert it")


def near_file(file: Path) -> str:
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def with_columns(row: DatasetRow, source: RowSourceOptions) -> DatasetRow:
    """The row with its JSON read and its columns renamed."""
    columns = dict(row.columns)
    if "instruction" in source.columns.values() and columns.get("input") and {"output", "chosen"} & columns.keys():
        raise UserError(
            f"{row.where}: `columns` renames the instruction of an Alpaca row, whose `input` would not be read.  Remove"
            " instruction from `columns`: both are read without it."
        )
    for name in (*source.json_columns, *source.columns.values()):
        if name not in columns:
            near = did_you_mean(name, columns)
            raise UserError(f"{row.where}: no column `{name}`, which `columns` or `json_columns` names. {near}")
    for name in source.json_columns:
        columns[name] = parsed_column(columns[name], f"{row.where}: the column `{name}`")
    renamed = {new: columns[old] for new, old in source.columns.items()}
    kept = {name: value for name, value in columns.items() if name not in {*source.columns.values(), *renamed}}
    return DatasetRow(row.where, {**renamed, **kept})


def parsed_column(text: object, where: str) -> object:
    """The value of a JSON text; other values unchanged."""
    if not isinstance(text, str):
        return text
    try:
        value = checked_value(file_rows.parse_json(text))
        if isinstance(value, UserError):
            raise value
    except json.JSONDecodeError as error:
        remedy = "Leave it out of json_columns to have it as text."
        raise UserError(f"{where}: not JSON: {error.msg} in {text!r:.80}. {remedy}") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return value


def require_column(rows: Sequence[DatasetRow], name: str) -> None:
    """Reject rows in which a column is missing or empty."""
    for row in rows:
        if row.columns.get(name) in (None, "", []):
            near = did_you_mean(name, row.columns)
            missing = f"no column `{name}`. {near} Set task.prompt_column (check-task: --prompt-column)."
            empty = f"the column `{name}` is empty; fill it or drop the row"
            raise UserError(f"{row.where}: {empty if name in row.columns else missing}")
