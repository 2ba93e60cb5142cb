"""Rows of JSON lines, of a JSON list and of CSV, with the number of the line that each begins at.

A row that cannot be read is there as the UserError that says why, so that the caller may count it.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from posttrain.errors import UserError

Found = Iterator[tuple[int, object]]
"""Line, and what stands there: a row, or the UserError that says why there is none."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes half of a character, which alone is none; nothing else in a file of UTF-8 can be one."""
DELIMITERS = (",", ";", "\t", "|")
"""Those that are looked for, the first of those that make as many columns."""


def json_lines(file: Path) -> Found:
    """One row per line; blank lines are passed over."""
    # Only "\n" ends a line: JSON strings may hold the other line ends that str.splitlines() splits at.
    for number, line in enumerate(file.read_bytes().removeprefix(BYTE_ORDER_MARK).split(b"\n"), start=1):
        if line.strip():
            yield number, json_line(line)


def json_line(line: bytes) -> object:
    """What a line holds, or what is wrong with it."""
    try:
        text = line.decode("utf-8")
        value = json.loads(text)
        return whole_characters(value) if HALF.search(text) else value
    except UnicodeDecodeError as error:
        return UserError(f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return UserError(
            f"not JSON at column {error.colno}: {error.msg}. Every line holds one whole object,"
            f' such as {{"prompt": "1 + 1 = ", "answer": "2"}}. The line: {text[:80]!a}'
        )
    except RecursionError:
        return UserError("its values lie too deep within each other; leave out what no reward reads")


def json_list(file: Path) -> Found:
    """The items of a file that holds one JSON list; they count from 1, as lines tell nothing of them."""
    try:
        text = file.read_bytes().removeprefix(BYTE_ORDER_MARK).decode("utf-8")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file.name}:{error.lineno}: not JSON at column {error.colno}: {error.msg}."
            " One object per line is the format of a .jsonl file."
        ) from error
    if not isinstance(value, list):
        raise UserError(f"{file}: must hold a list of objects, not {type(value).__name__}")
    return iter(enumerate(map(whole_characters, value) if HALF.search(text) else value, start=1))


def whole_characters(value: object) -> object:
    """The value, or what is wrong with it where a text in it is cut inside a character."""
    half = half_character(value)
    if half is None:
        return value
    return UserError(
        f"{half!a} holds half a character (a lone surrogate), which no tokenizer and no file takes; write the text"
        " again without cutting it inside a character, or drop the row"
    )


def half_character(value: object) -> str | None:
    """The beginning of a text within a value that UTF-8 cannot write; None where there is none."""
    if isinstance(value, str):
        if value.isascii():
            return None
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[max(0, error.start - 20) : error.start + 20]
        return None
    if isinstance(value, Mapping):
        parts: Iterable[object] = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return None
    return next((half for part in parts if (half := half_character(part)) is not None), None)


def csv_rows(file: Path, delimiter: str) -> Found:
    """The rows below the first line of a CSV file, all cells text; a cell in quotes may go over several lines."""
    # A byte that is no UTF-8 becomes half a character, by which its row is known.
    text = file.read_bytes().removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape")
    delimiter = delimiter or likely_delimiter(text.partition("\n")[0])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    number = 1
    try:
        header = next(reader, [])
        if not header or len(set(header)) < len(header):
            fault = f"two columns of one name: {', '.join(header)}" if header else "the first line names no columns"
            raise UserError(f"{file}: cannot be read as csv: {fault}")
        number = reader.line_num + 1
        for cells in reader:
            if cells:
                yield number, csv_row(header, cells)
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{file.name}:{number}: cannot be read as csv: {error}. A quote within a cell in quotes is written twice."
            " Longer texts than 131072 characters need .jsonl or .parquet."
        ) from error


def csv_row(header: Sequence[str], cells: Sequence[str]) -> object:
    """A row by the names in the header, or what is wrong with it."""
    if len(cells) != len(header):
        return UserError(
            f"{len(cells)} cells in a table of {len(header)} columns ({', '.join(header)}); put a cell that holds the"
            " delimiter or a line's end in quotes"
        )
    if any("\udc80" <= letter <= "\udcff" for cell in cells if not cell.isascii() for letter in cell):
        return UserError("not UTF-8; save the file as UTF-8")
    return dict(zip(header, cells, strict=True))


def likely_delimiter(line: str) -> str:
    """The delimiter that makes most columns of a header."""

    def num_columns(delimiter: str) -> int:
        return max((len(cells) for cells in csv.reader([line], delimiter=delimiter)), default=0)

    return max(DELIMITERS, key=num_columns)
