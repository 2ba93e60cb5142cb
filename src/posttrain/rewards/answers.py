"""Reading what a reward function returned: one finite score per completion, or what is wrong with it.

Loads neither torch nor numpy, so that a worker process starts at once.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

from posttrain.rewards.function import ScoringFailure
from posttrain.rewards.graded import Detailed, Graded

RULE = "A score is a finite number, None where the function does not apply, or a Graded."
EXCERPT = 200
"""Characters of a text that an error shows."""


class Score(NamedTuple):
    """What a function said of one completion."""

    value: float
    """NaN where it said nothing."""
    outcome: str = ""
    """How the completion fared, where the function tells."""
    details: Mapping[str, object] | None = None
    """What else it tells, for the journal."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a function's answer, for one row or for a whole call."""

    text: str
    cause: BaseException | None = None


class NotAsked(ScoringFailure):
    """There was no time left to ask, or too much had gone wrong before."""


Verdict = Score | ScoringFailure | Problem
UNSCORED = Score(math.nan)


@dataclass(frozen=True, slots=True)
class Answered:
    """What a call came to where its verdicts have been read already, in a worker."""

    verdicts: list[Verdict] | Problem


@runtime_checkable
class Array(Protocol):
    """An array or tensor of numpy, torch or another library."""

    @property
    def shape(self) -> Any: ...

    def item(self) -> Any: ...


def verdicts_in(result: object, *, one_by_one: bool, count: int) -> list[Verdict] | Problem:
    """One verdict for each of `count` completions, or what is wrong with the result as a whole."""
    if one_by_one:
        return [verdict(result)]
    if isinstance(result, Graded | str | bytes | Mapping) or not isinstance(result, Iterable):
        return Problem(f"returned {shown(result)} for {count} completions; it must return a list of scores")
    if isinstance(result, Array) and len(result.shape) == 0:
        return Problem(f"returned a single number for {count} completions; it must return a list of scores")
    values = list(result)
    if len(values) != count:
        return Problem(f"returned {len(values)} scores for {count} completions; it must return one for each")
    return [verdict(value) for value in values]


def verdict(value: object) -> Verdict:
    """The score that one returned value stands for."""
    outcome, details = "", None
    if isinstance(value, Graded):
        details = value.details if isinstance(value, Detailed) else None
        outcome, value = str(value.outcome), value.score
        if not (details is None or is_json(details)):
            return Problem(f"returned details that are no JSON: {shown(details)}")
    if value is None:
        return Score(math.nan, outcome, details)
    if isinstance(value, ScoringFailure):
        return value
    if isinstance(value, Array) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real):
        return Problem(f"returned {shown(value)}. {RULE}")
    try:
        number = float(value)
    except OverflowError as error:
        return Problem(f"returned a number too large for a float. {RULE}", error)
    return Score(number, outcome, details) if math.isfinite(number) else Problem(f"returned {number}. {RULE}")


def is_json(details: object) -> bool:
    """Whether something can be written down as JSON."""
    try:
        json.dumps(details, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(details, Mapping)


def raised(cause: BaseException) -> Problem:
    """What is wrong where the function raised."""
    return Problem(f"raised {type(cause).__name__}: {str(cause)[:EXCERPT]}", cause)


def shown(value: object) -> str:
    """A value of the wrong kind, in few words."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"
