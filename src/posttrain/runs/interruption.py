"""SIGINT and SIGTERM end a run after the current step, with a checkpoint, and before the first step at once.

A `posttrain` command that runs as a child process is interrupted with its parent.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from posttrain.errors import RunError
from posttrain.runs.files import no_link, saved_steps
from posttrain.runs.folder import resume_command

GOES_ON = "Finished parts are kept; the same command continues with the rest."


class Interruption:
    """Whether the run is to stop."""

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
def interruptible() -> Iterator[Interruption]:
    """Note the first SIGINT or SIGTERM; a second one has its usual effect.

    Outside the main thread, where Python allows no handlers, signals keep their usual effect.
    """
    interruption = Interruption()
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}

    def note(number: int, frame: FrameType | None) -> None:
        interruption.signal = signal.Signals(number)
        for name, handler in before.items():
            signal.signal(name, handler)

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


class StoppedAtOnce(KeyboardInterrupt):
    """A signal ended the work; the message names it and says what is kept."""


@contextmanager
def stopped_with_a_word(kept: Callable[[], str]) -> Iterator[None]:
    """Let SIGTERM end the block as SIGINT does, with a message that says what is kept.

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
        raise StoppedAtOnce(f"{by.name}: interrupted.  {kept()}") from stop
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def what_is_kept(run: Path | str, command: str) -> str:
    """What a run has saved, and the command that continues it; "" is one that has not begun."""
    saved = saved_steps(Path(run, "checkpoints")) if run else {}
    if not saved:
        return "Nothing of this run is kept yet."
    return (
        f"Kept: step {max(saved)} and what came before it.  Go on with   {resume_command(Path(run), command)}   (in"
        " Python train(config, resume=True))"
    )


def run_posttrain(command: Sequence[str], *, name: str, log: Path) -> None:
    """Run `posttrain` with these arguments; its output is appended to a log.

    An interruption is passed on once, and the run saves its current step.  It has its own session, since Ctrl-C reaches
    all processes of a session and a second signal ends a run at once.  Raises RunError where the command fails, with
    `name` in the message.
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
            code = process.wait()
        except BaseException:
            process.terminate()
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
