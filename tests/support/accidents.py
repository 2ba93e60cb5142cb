"""Things that happen to a run from outside, at a moment that a test chooses."""

import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Accident:
    """A full disk, or a signal."""

    largest_file: int | None = None
    """Bytes; writing more to a file fails, as it does on a full disk."""
    moment: str = ""
    """Just before what the signal comes: an event of Python's audit hooks, the end of the path that it touches, and
    which time it happens.  `os.rename .tmp-summary.json 1`; opening counts where it is for writing."""
    signal: int = signal.SIGKILL
    """SIGKILL is what a power cut looks like from inside."""


def arrange(accident: Accident) -> None:
    """Let it happen to this process."""
    if accident.largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (accident.largest_file, accident.largest_file))
    if not accident.moment:
        return
    named, path, count = accident.moment.split()
    left = int(count)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == named and str(arguments[0]).endswith(path) and (event != "open" or for_writing(arguments[2])):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), accident.signal)

    sys.addaudithook(watch)


def for_writing(flags: object) -> bool:
    """Whether these flags of open(2) allow to write."""
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def flip_bit(file: Path) -> None:
    """Damage a file as a bad disk does: the last bit of it."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
