"""Reads the files of a run's folder in any state: half written, damaged, of an older version, or missing.

A file that cannot be read raises Unreadable with one line for the page.  What was read is kept until the file changes.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Generic, TypeVar

from posttrain.runs.progress import visible

MOST_BYTES = 64 << 20
"""Of a file that is read whole."""

Content = TypeVar("Content")
Stamp = tuple[int, int, int]
"""Size, modification time and inode: changes whenever the file is written or replaced."""


class Unreadable(Exception):
    """A file that cannot be read; the message is one line."""

    def __init__(self, name: str, what: object) -> None:
        super().__init__(f"{name}: {visible(' '.join(str(what).split())[:300])}")


def content_or(missing: Content, read: Callable[[], Content], faults: list[str]) -> Content:
    """The content, or else `missing` and a fault, which is noted once."""
    content = missing
    with noting(faults):
        content = read()
    return content


@contextmanager
def noting(faults: list[str]) -> Iterator[None]:
    """Note an unreadable file once, and continue after the block."""
    try:
        yield
    except Unreadable as fault:
        if str(fault) not in faults:
            faults.append(str(fault))


def stamp(path: Path) -> Stamp | None:
    """None if it is not a regular file; reading a pipe, for example, would wait."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ino) if S_ISREG(found.st_mode) else None


def open_file(path: Path) -> BinaryIO:
    """Open a file of a folder.  A link may lead to what is not the run's, and is not followed.  Raises OSError."""
    if path.is_symlink():
        raise OSError("it is a link, which the viewer does not follow.  Put the file itself there")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))


class WholeFile(Generic[Content]):
    """A small file, such as summary.json, and its content."""

    def __init__(self, path: Path, read: Callable[[bytes], Content], missing: Content) -> None:
        self.path, self.read, self.missing = path, read, missing
        self._known: tuple[Stamp, Content | Unreadable] | None = None

    def content(self) -> Content:
        """The content of the file, or `missing`.  Raises Unreadable for a damaged file."""
        now = stamp(self.path)
        if now is None:
            return self.missing
        if self._known is None or self._known[0] != now:
            self._known = now, self._read(now[0])
        if isinstance(self._known[1], Unreadable):
            raise self._known[1]
        return self._known[1]

    def _read(self, size: int) -> Content | Unreadable:
        try:
            if size > MOST_BYTES:
                raise ValueError(f"{size} bytes, more than the viewer reads")
            with open_file(self.path) as file:
                return self.read(file.read(min(size, MOST_BYTES) + 1))
        except (ValueError, OSError, RecursionError) as error:
            return Unreadable(self.path.name, f"cannot be read ({error})")


def parsed_object(content: bytes) -> dict[str, object]:
    """The JSON object in a file.  Raises ValueError."""
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def json_number(value: object) -> float | int | None:
    """A number that JSON supports; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number of more than 308 digits
        return None


def json_value(value: object) -> object:
    """A value for JSON: null if it is not finite, and text if JSON does not support it."""
    match value:
        case dict():
            return {str(name): json_value(item) for name, item in value.items()}
        case list():
            return [json_value(item) for item in value]
        case float():
            return json_number(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def mapping(value: object) -> Mapping[str, object]:
    """The value if it is a JSON object, else an empty one: other programs may have written anything."""
    return value if isinstance(value, dict) else {}
