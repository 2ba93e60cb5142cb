"""Rows of a local file, each with the place it came from; every fault is reported by that place."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import UserError

MEMORY = "rows"
"""Where rows come from that are in no file."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row and where to find it."""

    where: str
    """FILE:LINE for JSON lines, FILE:NUMBER, from 1, for other rows."""
    columns: Mapping[str, object]


def rows_of(values: Iterable[object], source: str) -> list[DatasetRow]:
    """Numbered rows, each known to be a mapping."""
    rows = []
    for number, value in enumerate(values, start=1):
        where = f"{source}:{number}"
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: a row must be an object of named columns, not {type(value).__name__}")
        rows.append(DatasetRow(where, dict(value)))
    if not rows:
        raise UserError(f"{source}: there are no rows; give at least one")
    return rows


def read_rows(path: str) -> list[DatasetRow]:
    """All rows of a .jsonl, .json, .csv or .parquet file."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path}: no such file{near_file(file)}. Paths are relative to the folder you run in.")
    match file.suffix.lower():
        case ".jsonl":
            return read_json_lines(file)
        case ".json":
            return rows_of(read_json_list(file), file.name)
        case ".csv" | ".parquet":
            return rows_of(read_table(file), file.name)
    raise UserError(f"{path}: rows are read from .jsonl, .json, .csv and .parquet files; convert it to one of these")


def near_file(file: Path) -> str:
    """A file beside the missing one whose name is like it."""
    names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def read_text(file: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error


def read_json_lines(file: Path) -> list[DatasetRow]:
    """One row per line; blank lines are passed over."""
    rows: list[DatasetRow] = []
    # Only "\n" ends a line: JSON strings may hold the other line ends that str.splitlines() splits at.
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            where = f"{file.name}:{number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{where}: not JSON at column {error.colno}: {error.msg}. Every line holds one whole object,"
                    f' such as {{"prompt": "1 + 1 = ", "answer": "2"}}. The line: {line[:80]!a}'
                ) from error
            if not isinstance(value, dict):
                raise UserError(f"{where}: a row must be an object of named columns, not {type(value).__name__}")
            rows.append(DatasetRow(where, value))
    if not rows:
        raise UserError(f"{file}: there are no rows; give at least one")
    return rows


def read_json_list(file: Path) -> list[object]:
    """The items of a file that holds one JSON list."""
    try:
        value = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file.name}:{error.lineno}: not JSON at column {error.colno}: {error.msg}."
            " One object per line is the format of a .jsonl file."
        ) from error
    if not isinstance(value, list):
        raise UserError(f"{file}: must hold a list of objects, not {type(value).__name__}")
    return value


def read_table(file: Path) -> Sequence[object]:
    """The rows of a CSV or Parquet file."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        table = csv.read_csv(file) if file.suffix.lower() == ".csv" else parquet.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as {file.suffix[1:]}: {error}") from error
    rows: list[object] = table.to_pylist()
    return rows


def require_column(rows: Sequence[DatasetRow], name: str) -> None:
    """Refuse rows of which one lacks the column or holds nothing in it."""
    for row in rows:
        if row.columns.get(name) in (None, "", []):
            if name in row.columns:
                raise UserError(f"{row.where}: the column `{name}` is empty; fill it or drop the row")
            near = difflib.get_close_matches(name, row.columns, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(row.columns) or 'no columns'}."
            remedy = "Name the prompt's column by task.prompt_column, in check-task by --prompt-column."
            raise UserError(f"{row.where}: no column `{name}`. {hint} {remedy}")
