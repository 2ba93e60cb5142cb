"""Seconds by stage."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the wall time of named stages: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count what happens inside as part of a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - began

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())
