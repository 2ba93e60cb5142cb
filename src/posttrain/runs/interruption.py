"""Leaving cleanly: SIGINT and SIGTERM end a run after the step in progress, with a checkpoint."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether someone asked the run to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


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
