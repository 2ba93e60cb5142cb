"""Leaving cleanly: SIGINT and SIGTERM end a run after the step in progress, with a checkpoint; before steps at once.

A `posttrain` command that is run as a process of its own is interrupted with the one that waits for it.
"""

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from posttrain.errors import RunError
from posttrain.runs.files import no_link
from posttrain.runs.folder import shown
from posttrain.runs.manifest import saved_steps

GOES_ON = "What is finished is kept; the same command goes on with the rest."


class Interruption:
    """Whether someone asked the run to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.left = False
        """Whether whoever takes the steps one by one wants no more of them."""

    def __bool__(self) -> bool:
        return self.left or self.signal is not None

    @property
    def reason(self) -> str:
        """What stopped the run, as its last lines name it."""
        return "closed" if self.signal is None else self.signal.name


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Note the first SIGINT or SIGTERM instead of dying of it; a second one has its usual effect.

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
    """A signal ended the work; the message says which one, and what is kept."""


@contextmanager
def stopped_with_a_word(kept: Callable[[], str]) -> Iterator[None]:
    """Have SIGTERM end what goes on inside as SIGINT does, and both say what is kept.

    Outside the main thread, or where the program has a handler of its own, SIGTERM keeps its effect.
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


def what_is_kept(run: Path, command: str) -> str:
    """What a run that was stopped at once leaves to go on from."""
    saved = saved_steps(run / "checkpoints")
    if not saved:
        return NOTHING_KEPT
    return (
        f"Kept: step {max(saved)} and what came before it.  Go on with   posttrain {command} --resume"
        f" {shlex.quote(str(shown(run)))}   (in Python train(config, resume=True))"
    )


def stopped_while_loading(resumed: str, command: str) -> AbstractContextManager[None]:
    """For all of a command, from its first import on: until the folder is known to be of this run, what it resumes."""
    return stopped_with_a_word(lambda: what_is_kept(Path(resumed), command) if resumed else NOTHING_KEPT)


NOTHING_KEPT = "Nothing of this run is kept yet."


def run_posttrain(command: Sequence[str], *, name: str, log: Path) -> None:
    """Run `posttrain` with these arguments; what it prints goes to the end of a log.

    An interruption is passed on once, and waited for: the run saves the step that it is at.  It is in a session of its
    own, for a terminal's Ctrl-C goes to all that are in one, and a second signal ends a run at once.  Raises RunError
    where the command fails; `name` is what the message calls it.
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
            terminate(process)
            raise
    if code:
        said = log.read_bytes()[said_before:].decode("utf-8", errors="replace")
        last = said.strip().splitlines()[-1:]
        raise RunError(
            f"{name}: `posttrain {' '.join(command)}` ended with {code}: {''.join(last)}\n    {log} has all that it"
            f" said.  {GOES_ON}"
        )


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Tell a process to end, and wait until it has; whoever is interrupted in waiting tells it again."""
    process.terminate()
    try:
        process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
