"""Countdown's puzzle and the verdict on an answer to it."""

from dataclasses import dataclass
from typing import Literal

NumbersRule = Literal["all", "subset"]
"""Whether an answer uses every given number exactly once, or each at most once."""


@dataclass(frozen=True, slots=True)
class Countdown:
    """One puzzle: make `target` from `numbers`."""

    numbers: tuple[int, ...]
    target: int
    rule: NumbersRule = "all"
