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
    details: Mapping[str, object] | None = None
    """What else there is to say of it, as plain JSON: goes into the run's scores.jsonl and nowhere else."""
