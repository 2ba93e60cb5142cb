"""How the time that reading takes grows with the text, measured so that a busy machine does not matter."""

import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHORT, LONG = 160_000, 640_000
LINEAR = 8.0
"""Four times the text takes four times as long where each character is read a fixed number of times, and sixteen times
as long where each is compared with all others: this lies half-way, as factors go."""
PATIENCE = 10.0
"""Seconds after which no other try is begun."""


@contextmanager
def takes(*, most: float, least: float = 0.0) -> Iterator[None]:
    """Expect a block to take so many seconds."""
    begun = time.monotonic()
    yield
    assert least <= time.monotonic() - begun < most


def a_millisecond_of_work() -> None:
    """Additions that take a millisecond on a machine of 2025 with nothing else to do."""
    total = 0
    for number in range(25_000):
        total += number * number


def milliseconds(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    return 1000 * timeit.timeit(work, timer=time.process_time, number=1)


def idle_milliseconds(work: Callable[[], object]) -> float:
    """Processor time of a call on an idle machine: a busy one is as slow with work that is known."""
    before, taken, after = (milliseconds(each) for each in (a_millisecond_of_work, work, a_millisecond_of_work))
    return taken / max(before, after)


def time_ratio(read: Callable[[str], object], piece: str) -> float:
    """How many times as long four times the text takes, in processor time; tried again while it is not linear."""
    short, long = (piece * (length // len(piece)) for length in (SHORT, LONG))
    begun = time.process_time()
    ratio = best_short = best_long = float("inf")
    while ratio >= LINEAR and time.process_time() - begun < PATIENCE:
        best_short = min(best_short, *timeit.repeat(lambda: read(short), timer=time.process_time, repeat=3, number=1))
        best_long = min(best_long, *timeit.repeat(lambda: read(long), timer=time.process_time, repeat=1, number=1))
        ratio = best_long / best_short
    return ratio
