"""SIGINT and SIGTERM end a run after the current step, with a checkpoint; before the first step, immediately.

A `posttrain` command in a child process is interrupted with its parent.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from posttrain.errors import RunError, StoppedAtOnce
from posttrain.runs.files import no_link, saved_steps
from posttrain.runs.folder import resume_command

GOES_ON = "Finished parts are kept; the same command continues with the rest."
LOOK_SECONDS = 1.0
"""Seconds between checks of a child process's output."""


@dataclass(frozen=True, slots=True)
class KeptWork:
    """What is saved of work that a signal ends."""

    says: str
    goes_on: str = ""
    """The command to continue; empty if the typed command continues."""
    verb: str = "Continue with"
    """The words before that command."""


NOTHING_KEPT = KeptWork("Nothing was kept.", verb="Start again with")


class Interruption:
    """Whether the run should stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.left = False
        """Whether the caller who takes the steps one by one has left."""

    def __bool__(self) -> bool:
        return self.left or self.signal is not None

    @property
    def reason(self) -> str:
        return "closed" if self.signal is None else self.signal.name


@contextmanager
def interruptible(says: Callable[[], str] | None = None) -> Iterator[Interruption]:
    """Note the first SIGINT or SIGTERM, and print what happens now; a second one has its usual effect.

    Outside the main thread, where Python does not allow handlers, signals keep their usual effect.
    """
    interruption = Interruption()
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}

    def note(number: int, frame: FrameType | None) -> None:
        interruption.signal = signal.Signals(number)
        for name, handler in before.items():
            signal.signal(name, handler)
        if says is not None:
            answer_signal(f"{interruption.reason}: {says()}  Interrupt again to stop immediately.")

    try:
        for number in watched:
            signal.signal(number, note)
    except ValueError:
        yield interruption
        return
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def answer_signal(text: str) -> None:
    """Print to stderr from a signal handler, bypassing Python's buffers, which may be in the middle of a write."""
    start = "\n" if os.isatty(2) else ""  # the terminal shows ^C in the current line
    os.write(2, f"{start}{text}\n".encode())


@contextmanager
def stopped_with_a_word(kept: Callable[[], KeptWork]) -> Iterator[None]:
    """Let SIGTERM end the block as SIGINT does, with a message that says what is saved.

    Outside the main thread, or where the program has a handler, SIGTERM keeps its effect.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt(signal.SIGTERM)

    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except StoppedAtOnce:
        raise
    except KeyboardInterrupt as stop:
        by = signal.SIGTERM if stop.args == (signal.SIGTERM,) else signal.SIGINT
        work = kept()
        says = f"{by.name}: interrupted.  {work.says}"
        if work.goes_on:
            raise StoppedAtOnce(f"{says}  {work.verb}   {work.goes_on}") from stop
        raise StoppedAtOnce(says, same_command=work.verb) from stop
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def kept_of_run(run: Path | str, command: str) -> KeptWork:
    """What a run has saved, and the command that continues it; "" is a run that has not started."""
    saved = saved_steps(Path(run, "checkpoints")) if run else {}
    if not saved:
        return KeptWork("Nothing of this run is kept yet.", verb="Start again with")
    resume = f"{resume_command(Path(run), command)}   (in Python train(config, resume=True))"
    return KeptWork(f"Kept: step {max(saved)} and everything before it.", resume)


def run_posttrain(command: Sequence[str], *, name: str, log: Path, show: Callable[[str], None] | None = None) -> None:
    """Run `posttrain` with these arguments; its output is appended to a log, and `show` gets its last line.

    An interruption is passed on once, and the run saves its current step.  The command has its own session, since
    Ctrl-C reaches all processes of a session, and a second signal ends a run immediately.  Raises RunError, with `name`
    in the message, if the command fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=no_link) as output:
        said_before = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = wait_showing(process, log, said_before, show)
        except BaseException:
            process.terminate()
            answer_signal(f"{name}: it stops after its current step.  Interrupt again to stop immediately.")
            try:
                process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            raise
    if code:
        said = log.read_bytes()[said_before:].decode("utf-8", errors="replace")
        last = said.strip().splitlines()[-1:]
        raise RunError(
            f"{name}: `posttrain {' '.join(command)}` ended with {code}: {''.join(last)}\n    Its output is in {log}.  "
            f"{GOES_ON}"
        )


def wait_showing(process: subprocess.Popen[bytes], log: Path, begin: int, show: Callable[[str], None] | None) -> int:
    """Wait for a process; `show` regularly gets the last line that it has written to its log since `begin`."""
    while True:
        try:
            return process.wait(LOOK_SECONDS if show else None)
        except subprocess.TimeoutExpired:
            assert show is not None
            if line := last_line(log, begin):
                show(line)


def last_line(log: Path, begin: int) -> str:
    """The last non-empty line of a log after a position."""
    with open(log, "rb") as said:
        said.seek(max(begin, said.seek(0, os.SEEK_END) - 4000))
        return said.read().decode("utf-8", errors="replace").strip().rpartition("\n")[2]
