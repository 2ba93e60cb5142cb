"""Files of a run's folder, read as they are: half written, damaged, of an older version, or not there.

A file that cannot be read raises Unreadable with one line for the page.  What was read is kept until the file changes,
and of a journal that grew only the new lines are read.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Generic, TypeVar

from posttrain.runs.progress import visible

MOST_BYTES = 64 << 20
"""Of a file that is read whole."""
TAIL_BYTES = 64 << 10
"""At the end of a journal."""
MOST_FAULTS = 20
"""Damaged lines that a journal names one by one."""

Content = TypeVar("Content")
Stamp = tuple[int, int, int]
"""Size, time of the last change and inode: changes with every file that is written or replaced."""


class Unreadable(Exception):
    """A file that cannot be read; the message is one line."""

    def __init__(self, name: str, what: object) -> None:
        super().__init__(f"{name}: {visible(' '.join(str(what).split())[:300])}")


def content_or(missing: Content, read: Callable[[], Content], faults: list[str]) -> Content:
    """What can be read, else `missing` and a fault, noted once."""
    try:
        return read()
    except Unreadable as fault:
        if str(fault) not in faults:
            faults.append(str(fault))
        return missing


@contextmanager
def noting(faults: list[str]) -> Iterator[None]:
    """Note what cannot be read, once, and go on behind the block."""
    try:
        yield
    except Unreadable as fault:
        if str(fault) not in faults:
            faults.append(str(fault))


def stamp(path: Path) -> Stamp | None:
    """None for what is not a file, such as a pipe, which would be waited for."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ino) if S_ISREG(found.st_mode) else None


class WholeFile(Generic[Content]):
    """A small file, such as summary.json, and what it says."""

    def __init__(self, path: Path, read: Callable[[bytes], Content], missing: Content) -> None:
        self.path, self.read, self.missing = path, read, missing
        self._known: tuple[Stamp, Content | Unreadable] | None = None

    def content(self) -> Content:
        """What the file says, or `missing`.  Raises Unreadable for a damaged one."""
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
            return self.read(self.path.read_bytes())
        except (ValueError, OSError, RecursionError) as error:
            return Unreadable(self.path.name, f"cannot be read ({error})")


def json_object(content: bytes) -> dict[str, object]:
    """The JSON object in a file.  Raises ValueError."""
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


class Journal:
    """A file of JSON lines, one object each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[str] = []
        self._stamp: Stamp | None = None
        self._read_to, self._lines = 0, 0
        self._records: list[Mapping[str, object]] = []

    def records(self) -> list[Mapping[str, object]]:
        """All lines so far but those in `faults`.  A last line without an end is still being written."""
        now = stamp(self.path)
        if now is None:
            self._forget()
        elif now != self._stamp:
            grew = self._stamp is not None and now[2] == self._stamp[2] and now[0] >= self._read_to
            if not grew:
                self._forget()
            self._read_on()
            self._stamp = now
        return self._records

    def last_records(self) -> list[Mapping[str, object]]:
        """The last lines, as many as are in `TAIL_BYTES`: enough for a list of many runs, and nothing is kept."""
        now = stamp(self.path)
        if now is None or now == self._stamp:
            return self._records
        last = Journal(self.path)
        last._read_to = max(0, now[0] - TAIL_BYTES)
        last._read_on()
        if last.faults and now[0] > TAIL_BYTES:  # of the line that it began in
            del last.faults[0]
        self.faults = self.faults or last.faults
        return last._records

    def _forget(self) -> None:
        self.faults, self._records = [], []
        self._stamp, self._read_to, self._lines = None, 0, 0

    def _read_on(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_to)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read_to += len(line)
                    self._lines += 1
                    self._take(line)
        except OSError as error:
            self.faults.append(f"{self.path.name}: cannot be read ({error.strerror or error})")

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            if isinstance(record, dict) and "iteration" in record:  # of inverse RL
                record.setdefault("step", record["iteration"])
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError("not a JSON object with a step")
            self._records.append(record)
        except (ValueError, RecursionError) as error:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(f"{self.path.name}, line {self._lines}: damaged ({str(error)[:120]}); left out")


def number(value: object) -> float | int | None:
    """A number that JSON has; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number of more than 308 digits
        return None


def json_value(value: object) -> object:
    """A value as JSON can hold it: null for what is not finite, and the text of what JSON does not know."""
    match value:
        case dict():
            return {str(name): json_value(item) for name, item in value.items()}
        case list():
            return [json_value(item) for item in value]
        case float():
            return number(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def mapping(value: object) -> Mapping[str, object]:
    """The value if it is a JSON object, else an empty one: what another program wrote may be anything."""
    return value if isinstance(value, dict) else {}
