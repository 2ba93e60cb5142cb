"""Rows of files of JSON, CSV, Parquet and Arrow, of folders that `datasets` saved, and of the hub.

Rows of text files have line numbers; a bad row is a UserError, to be counted.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

from posttrain.errors import RunError, UserError

Found = Iterator[tuple[int, object]]
"""Line number, and a row or the UserError that says what is wrong with it."""
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
"""The delimiters to try; among those with equally many columns the first wins."""


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
            row: object
            try:
                text = line.decode("utf-8")
                row = parse_json(text)
                row = checked_value(row) if to_check(text) else row
            except UnicodeDecodeError as error:
                row = UserError(f"not UTF-8 at byte {error.start} of the line; save the file as UTF-8")
            except json.JSONDecodeError as error:
                row = UserError(
                    f"not JSON at column {error.colno}: {error.msg}. Every line holds one object, such as"
                    f' {{"prompt": "1 + 1 = "}}. The line: {text[:80]!a}'
                )
            except UserError as error:
                row = error
            yield number, row


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
    """The value of a JSON text.  Raises UserError if Python has no room for it, else JSONDecodeError."""
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
            try:
                part.encode()
            except UnicodeEncodeError as error:
                half = part[max(0, error.start - 20) : error.start + 20]
                return UserError(f"{half!a} holds half a character (a lone surrogate); correct it or drop the row")
        elif isinstance(part, int):
            if part.bit_length() > LONGEST_INTEGER:
                return UserError(LONG_INTEGER)
        elif isinstance(part, Mapping):
            parts += [(each, depth + 1) for each in (*part.values(), *part.keys())]
        elif isinstance(part, list | tuple):
            parts += [(each, depth + 1) for each in reversed(part)]
    return value


def csv_rows(file: Path, delimiter: str) -> Found:
    """The rows below the first line of a CSV file, all cells text; a cell in quotes may go over several lines."""
    # A byte that is not UTF-8 becomes half a character, which marks its row.
    text = file_content(file).decode("utf-8", "surrogateescape")
    first = text.partition("\n")[0]
    delimiter = delimiter or max(
        DELIMITERS, key=lambda each: max(map(len, csv.reader([first], delimiter=each)), default=0)
    )
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    number = 1
    try:
        header = next(reader, [])
        if not header or len(set(header)) < len(header):
            fault = f"two columns are named alike: {', '.join(header)}" if header else "the first line names no columns"
            raise UserError(f"{file}: cannot be read as csv: {fault}")
        number = reader.line_num + 1
        for cells in reader:
            row: object = dict(zip(header, cells, strict=False))
            if len(cells) != len(header):
                columns = f"{len(header)} columns ({', '.join(header)})"
                row = UserError(f"{len(cells)} cells for {columns}; quote cells that hold the delimiter or a line end")
            elif any("\udc80" <= letter <= "\udcff" for cell in cells if not cell.isascii() for letter in cell):
                row = UserError("not UTF-8; save the file as UTF-8")
            if cells:
                yield number, row
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{file.name}:{number}: cannot be read as csv: {error}. Write a quote within quotes twice; use .jsonl for"
            " texts of more than 131072 characters."
        ) from error


HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
"""OWNER/NAME."""
HUB_SECONDS = 5.0
"""How long a hub may take to answer."""


@contextmanager
def loading_rows(file: Path, kind: str) -> Iterator[None]:
    """Inside, errors of a damaged file are the user's."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as {kind}: {error}") from error


def parquet_rows(file: Path) -> Sequence[object]:
    from pyarrow import parquet

    with loading_rows(file, "parquet"):
        return list(parquet.read_table(file).to_pylist())


def arrow_rows(file: Path) -> Sequence[object]:
    """The rows of an Arrow file, in the format of streams (as `datasets` caches it) or of files."""
    import pyarrow as pa

    with loading_rows(file, "arrow"), pa.memory_map(str(file)) as content:
        is_file = content.read(6) == b"ARROW1"
        content.seek(0)
        opened = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
        return list(opened.read_all().to_pylist())


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def chosen_split(path: str, names: Iterable[str], split: str) -> str:
    """The requested split; by default `train`, or the only one."""
    known = [*names]
    chosen = split or ("train" if "train" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        problem = f"no split {split}" if split else "several splits"
        raise UserError(f"{path}: {problem}. There are {', '.join(known)}; name one as `split`.")
    return chosen


def saved_rows(folder: Path, split: str) -> Sequence[object]:
    """The rows of a data set that `datasets` saved, read without `datasets`."""
    import pyarrow as pa

    try:
        home, listing = folder, folder / "dataset_dict.json"
        if listing.is_file():
            home = folder / chosen_split(str(folder), json.loads(listing.read_text(encoding="utf-8"))["splits"], split)
        elif split:
            raise UserError(f"{folder}: split = {split}, but it holds a single data set; leave the split out")
        tables = []
        for each in json.loads((home / "state.json").read_text(encoding="utf-8"))["_data_files"]:
            with pa.memory_map(str(home / each["filename"])) as content:
                tables.append(pa.ipc.open_stream(content).read_all())
        rows: list[object] = pa.concat_tables(tables).to_pylist()
    except (pa.ArrowException, OSError, KeyError, json.JSONDecodeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}: damaged ({fault}); save it again with save_to_disk of `datasets`") from error
    return rows


def hub_rows(path: str, *, subset: str, split: str, revision: str) -> Sequence[object]:
    """The rows of a data set on the hub.  Raises UserError with the remedy within seconds if it cannot be loaded."""
    remedy = f"On a machine with a network, `hf download` gets the files of {path} (type dataset); then name those."
    if find_spec("datasets") is None:
        raise UserError(f"{path}: no such file or folder. For the hub: `pip install posttrain[data]`. {remedy}")
    commit = hub_commit(path, revision)
    if not commit:
        raise RunError(f"{path}: no such file or folder, and the hub did not answer in {HUB_SECONDS:g} s. {remedy}")
    import datasets

    try:
        names = datasets.get_dataset_split_names(path, subset or None, revision=commit)
        chosen = chosen_split(path, names, split)
        return list(datasets.load_dataset(path, subset or None, split=chosen, revision=commit))
    except UserError:  # of a split that does not exist
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RunError(f"{path}: the library datasets cannot load it: {error}. {remedy}") from error


def hub_commit(path: str, revision: str) -> str:
    """The current commit of a data set on the hub; empty if it cannot be found within seconds."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        return ""
    address = f"{constants.ENDPOINT}/api/datasets/{path}/revision/{quote(revision or 'main', safe='')}"
    request = Request(address, headers=build_hf_headers())
    try:
        with urlopen(request, timeout=HUB_SECONDS) as answer:
            return str(json.load(answer)["sha"])
    except (OSError, ValueError, KeyError):  # no network, no such data set, no answer of a hub
        return ""
