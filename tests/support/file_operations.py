"""Every file operation in a folder, one after another: what a crash there would leave, or an error in its place.

Reading, opening, making, renaming, removing and listing are seen by Python's audit hook, syncing by a function in its
place.  What a process that dies at an operation leaves behind is a copy of the folder as it was just before it.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}
_watching: list[Callable[[str, str], None]] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in EVENTS:
        place = arguments[0]
        if isinstance(place, str | bytes | os.PathLike):
            _watching[-1](event, os.fsdecode(place))


sys.addaudithook(_watch)
_sync = os.fsync


def _synced(descriptor: int) -> None:
    if _watching:
        _watching[-1]("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
    _sync(descriptor)


@contextmanager
def watched(folder: Path, see: Callable[[int, str], None]) -> Iterator[None]:
    """Call `see` with the number, from 0, and the name of each operation in a folder, just before it."""
    count = 0

    def operation(event: str, place: str) -> None:
        nonlocal count
        if Path(place).absolute().is_relative_to(folder):
            number, count = count, count + 1
            watching = _watching.pop()  # what `see` does is none
            try:
                see(number, f"{event} {place}")
            finally:
                _watching.append(watching)

    _watching.append(operation)
    os.fsync = _synced  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = _sync
        _watching.pop()


def crashes(folder: Path, copies: Path, work: Callable[[Path], None]) -> Iterator[tuple[Path, int]]:
    """What a crash at each operation of some work leaves, and how many marks of `done` it had made by then."""
    found: list[Path] = []

    def keep(number: int, name: str) -> None:
        found.append(copies / f"{number}" / folder.name)
        found[-1].parent.mkdir()
        if folder.exists():
            shutil.copytree(folder, found[-1])
        (copies / f"{number}.done").write_text(str(len(DONE)))

    DONE.clear()
    copies.mkdir()
    with watched(folder, keep):
        work(folder)
    for number, copy in enumerate(found):
        yield copy, int((copies / f"{number}.done").read_text())


DONE: list[object] = []
"""What the work has acknowledged so far."""


def num_operations(folder: Path, work: Callable[[Path], None]) -> int:
    """How many operations some work has."""
    numbers: list[int] = []
    with watched(folder, lambda number, name: numbers.append(number)):
        work(folder)
    return len(numbers)


def fails_at(folder: Path, number: int, code: int, work: Callable[[Path], None]) -> BaseException | None:
    """Do some work with an error of the system at one of its operations; what that ended with, None if it went on."""

    def fail(each: int, name: str) -> None:
        if each == number:
            raise OSError(code, os.strerror(code), name)

    DONE.clear()
    try:
        with watched(folder, fail):
            work(folder)
    except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return error
    return None
