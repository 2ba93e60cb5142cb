"""Moments by which scores have to be there."""

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment, and the limit that set it."""

    at: float
    """By `time.monotonic()`."""
    says: str
    """What has come to pass then, as a failure tells it."""

    def left(self) -> float:
        """Seconds until then; infinite where there is no limit, negative where it is over."""
        return self.at - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self.left() <= 0


NEVER = Deadline(math.inf, "")


def after(seconds: float, says: str) -> Deadline:
    """So many seconds from now; 0 sets no limit."""
    return Deadline(time.monotonic() + seconds, says) if seconds else NEVER


def sooner(*deadlines: Deadline) -> Deadline:
    """The first of them."""
    return min(deadlines, key=lambda deadline: deadline.at)
