"""Things that happen to a run from outside, at a moment that a test chooses."""

import functools
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

PAUSED, GO = "paused", "go"
"""Files of a process that pauses: it has come to its moment, and may go on."""


@dataclass(frozen=True, kw_only=True)
class Accident:
    """A full disk, a signal, or a pause in which a test does something to this process or to another."""

    largest_file: int | None = None
    """Bytes; writing more to a file fails, as it does on a full disk."""
    moment: str = ""
    """Just before what it happens: an event of Python's audit hooks, the end of the path that it touches, and which
    time.  `os.rename .tmp-summary.json 1`; opening counts where it is for writing.  `call MODULE:NAME 2` is a call of
    a function, under the name by which it is called.  Of several moments, with commas, each is counted after the one
    before."""
    signal: int = signal.SIGKILL
    """SIGKILL is what a power cut looks like from inside; 0 pauses, in the working folder."""
    error: int = 0
    """The number of an error of the system, with which the operation fails instead."""


def arrange(accident: Accident) -> None:
    """Let it happen to this process."""
    if accident.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (accident.largest_file, accident.largest_file))
    if not accident.moment:
        return
    moments = [moment.split() for moment in accident.moment.split(", ")]
    for name in {path for event, path, _ in moments if event == "call"}:
        announce(name)
    here, (named, path, count) = os.getpid(), moments.pop(0)
    left = int(count)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left, named, path
        if (
            event != named
            or not str(arguments[0]).endswith(path)
            or (event == "open" and not for_writing(arguments[2]))
        ):
            return
        left -= 1
        if left == 0 and os.getpid() == here:
            if moments:
                named, path, count = moments.pop(0)
                left = int(count)
            elif accident.error:
                raise OSError(accident.error, os.strerror(accident.error), str(arguments[0]))
            elif accident.signal:
                os.kill(here, accident.signal)
            else:
                pause()

    sys.addaudithook(watch)


def announce(name: str) -> None:
    """Have each call of a function, `MODULE:NAME`, raise the audit event `call`."""
    module, _, path = name.partition(":")
    *owners, last = path.split(".")
    owner = functools.reduce(getattr, owners, import_module(module))
    function = getattr(owner, last)

    @functools.wraps(function)
    def announced(*args: object, **named: object) -> object:
        sys.audit("call", name)
        return function(*args, **named)

    setattr(owner, last, announced)


def pause() -> None:
    """Wait until the test says so."""
    Path(PAUSED).touch()
    while not Path(GO).exists():
        time.sleep(0.005)


def for_writing(flags: object) -> bool:
    """Whether these flags of open(2) allow to write."""
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def flip_bit(file: Path) -> None:
    """Damage a file as a bad disk does: the last bit of it."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
