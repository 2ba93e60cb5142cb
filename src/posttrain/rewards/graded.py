"""What a reward function may say about one completion beyond a number."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Graded(NamedTuple):
    """A score together with the way in which the completion earned or missed it."""

    score: float | None
    """None where the function does not apply to this completion: it then counts neither for nor against it."""
    outcome: StrEnum
    """Its rate is a metric, so that a parser's mistake shows as a jump in one outcome and not as a silent zero."""


class Detailed(Graded):
    """A verdict with more to say of it; in all else it is one without."""

    details: Mapping[str, object]
    """Plain JSON: goes into the run's scores.jsonl and nowhere else."""

    def __new__(cls, score: float | None, outcome: StrEnum, details: Mapping[str, object]) -> "Detailed":
        made = super().__new__(cls, score, outcome)
        made.details = details
        return made
