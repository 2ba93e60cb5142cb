"""Rows of JSON lines, of a JSON list and of CSV, with line numbers; a bad row is a UserError, to be counted."""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError

Found = Iterator[tuple[int, object]]
"""Line number, and a row or the UserError that says why there is none."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON writes half of a character; nothing else in a file of UTF-8 can be one."""
DEEPEST = 100
"""How deep values may be nested; reading and writing them uses Python's stack."""
LONGEST_INTEGER = 14_000
"""Bits of the longest integer in a row: Python writes and reads up to 4,300 digits."""
TOO_DEEP = f"its values are nested more than {DEEPEST} deep; leave out what no reward reads"
LONG_INTEGER = "an integer in it has more than 4,200 digits; write it as text"
DELIMITERS = (",", ";", "\t", "|")
"""The delimiters to try; of those with equally many columns the first wins."""


def file_content(file: Path) -> bytes:
    """What a file holds, uncompressed, without a byte order mark."""
    content = file.read_bytes()
    if file.suffix.lower() == ".gz":
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{file}: gzip cannot uncompress it: {error}.  Download or compress it again.") from error
    return content.removeprefix(BYTE_ORDER_MARK)


def json_line_rows(file: Path) -> Found:
    """One row per line; blank lines are skipped."""
    # Only "\n" ends a line: JSON strings may hold the other line ends that str.splitlines() splits at.
    for number, line in enumerate(file_content(file).split(b"\n"), start=1):
        if line.strip():
            yield number, json_line(line)


def json_line(line: bytes) -> object:
    try:
        text = line.decode("utf-8")
        value = parse_json(text)
        return checked_value(value) if to_check(text) else value
    except UnicodeDecodeError as error:
        return UserError(f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return UserError(
            f"not JSON at column {error.colno}: {error.msg}. Every line holds one object, such as"
            f' {{"prompt": "1 + 1 = "}}. The line: {text[:80]!a}'
        )
    except UserError as error:
        return error


def json_list_rows(file: Path) -> Found:
    """The items of a file that holds one JSON list; they count from 1, whatever their lines are."""
    content = file_content(file)
    try:
        text = content.decode("utf-8")
        value = parse_json(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"{file.name}:{error.lineno}: not JSON at column {error.colno}"
        raise UserError(f"{place}: {error.msg}. Name a file with one object per line .jsonl.") from error
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if not isinstance(value, list):
        raise UserError(f"{file}: must hold a list of objects, not {type(value).__name__}")
    return iter(enumerate(map(checked_value, value) if to_check(text) else value, start=1))


def parse_json(text: str) -> Any:
    """The value of a JSON text.  Raises UserError where Python has no room for it, else JSONDecodeError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(TOO_DEEP) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # of Python's limit of digits
        raise UserError(LONG_INTEGER) from error


def to_check(text: str) -> bool:
    """Whether the values of a JSON text may have a fault that `checked_value` finds."""
    return HALF.search(text) is not None or text.count("[") + text.count("{") > DEEPEST


def checked_value(value: object) -> object:
    """The value, or what is wrong with it: half a character, values too deep, an integer too long to be written."""
    parts: list[tuple[object, int]] = [(value, 0)]
    while parts:
        part, depth = parts.pop()
        if depth > DEEPEST:
            return UserError(TOO_DEEP)
        if isinstance(part, str):
            if half := half_character(part):
                return UserError(f"{half!a} holds half a character (a lone surrogate); mend the text or drop the row")
        elif isinstance(part, int):
            if part.bit_length() > LONGEST_INTEGER:
                return UserError(LONG_INTEGER)
        elif isinstance(part, Mapping):
            parts += [(each, depth + 1) for each in (*part.values(), *part.keys())]
        elif isinstance(part, list | tuple):
            parts += [(each, depth + 1) for each in reversed(part)]
    return value


def half_character(text: str) -> str:
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[max(0, error.start - 20) : error.start + 20]
    return ""


def csv_rows(file: Path, delimiter: str) -> Found:
    """The rows below the first line of a CSV file, all cells text; a cell in quotes may go over several lines."""
    # A byte that is not UTF-8 becomes half a character, which marks its row.
    text = file_content(file).decode("utf-8", "surrogateescape")
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
            f"{file.name}:{number}: cannot be read as csv: {error}. Write a quote within quotes twice; use .jsonl for"
            " texts of more than 131072 characters."
        ) from error


def csv_row(header: Sequence[str], cells: Sequence[str]) -> object:
    """A row by the names in the header, or what is wrong with it."""
    if len(cells) != len(header):
        columns = f"{len(header)} columns ({', '.join(header)})"
        return UserError(f"{len(cells)} cells for {columns}; quote cells that hold the delimiter or a line end")
    if any("\udc80" <= letter <= "\udcff" for cell in cells if not cell.isascii() for letter in cell):
        return UserError("not UTF-8; save the file as UTF-8")
    return dict(zip(header, cells, strict=True))


def likely_delimiter(line: str) -> str:
    def num_columns(delimiter: str) -> int:
        return max((len(cells) for cells in csv.reader([line], delimiter=delimiter)), default=0)

    return max(DELIMITERS, key=num_columns)
