"""Reading what a reward function returned: one finite score per completion, or what is wrong with it.

Loads neither torch nor numpy, so that a worker process starts at once.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

from posttrain.errors import RunError
from posttrain.rewards.grading.function import ScoringFailure

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
class InvalidScore:
    """What is wrong with a function's answer, for one row or for a whole call."""

    text: str
    cause: BaseException | None = None


class NoTimeToAsk(ScoringFailure):
    """There was no time left to ask, or too much had gone wrong before."""


Verdict = Score | ScoringFailure | InvalidScore
UNSCORED = Score(math.nan)


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What a call came to where its verdicts have been read already, in a worker."""

    verdicts: list[Verdict] | InvalidScore


@runtime_checkable
class Array(Protocol):
    """An array or tensor of numpy, torch or another library."""

    @property
    def shape(self) -> Any: ...

    def item(self) -> Any: ...


def verdicts_in(result: object, *, one_by_one: bool, count: int) -> list[Verdict] | InvalidScore:
    """One verdict for each of `count` completions, or what is wrong with the result as a whole."""
    if one_by_one:
        return [read_score(result)]
    if isinstance(result, Graded | str | bytes | Mapping) or not isinstance(result, Iterable):
        return InvalidScore(
            f"returned {value_and_type(result)} for {count} completions; it must return a list of scores"
        )
    if isinstance(result, Array) and len(result.shape) == 0:
        return InvalidScore(f"returned a single number for {count} completions; it must return a list of scores")
    values = list(result)
    if len(values) != count:
        return InvalidScore(f"returned {len(values)} scores for {count} completions; it must return one for each")
    return [read_score(value) for value in values]


def read_score(value: object) -> Verdict:
    """The score that one returned value stands for."""
    outcome, details = "", None
    if isinstance(value, Graded):
        details = value.details if isinstance(value, DetailedGrade) else None
        outcome, value = str(value.outcome), value.score
        if not (details is None or is_json(details)):
            return InvalidScore(f"returned details that are no JSON: {value_and_type(details)}")
    if value is None:
        return Score(math.nan, outcome, details)
    if isinstance(value, ScoringFailure):
        return value
    if isinstance(value, Array) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real):
        return InvalidScore(f"returned {value_and_type(value)}. {RULE}")
    try:
        number = float(value)
    except OverflowError as error:
        return InvalidScore(f"returned a number too large for a float. {RULE}", error)
    return Score(number, outcome, details) if math.isfinite(number) else InvalidScore(f"returned {number}. {RULE}")


def is_json(details: object) -> bool:
    """Whether something can be written down as JSON."""
    try:
        json.dumps(details, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(details, Mapping)


def raised(cause: BaseException) -> InvalidScore:
    """What is wrong where the function raised."""
    return InvalidScore(f"raised {type(cause).__name__}: {str(cause)[:EXCERPT]}", cause)


def value_and_type(value: object) -> str:
    """A value of the wrong kind, in few words."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


class Graded(NamedTuple):
    """A score together with the way in which the completion earned or missed it."""

    score: float | None
    """None where the function does not apply to this completion: it then counts neither for nor against it."""
    outcome: StrEnum
    """Its rate is a metric, so that a parser's mistake shows as a jump in one outcome and not as a silent zero."""


class DetailedGrade(Graded):
    """A verdict with more to say of it; in all else it is one without."""

    details: Mapping[str, object]
    """Plain JSON: goes into the run's scores.jsonl and nowhere else."""

    def __new__(cls, score: float | None, outcome: StrEnum, details: Mapping[str, object]) -> "DetailedGrade":
        made = super().__new__(cls, score, outcome)
        made.details = details
        return made


class FunctionError(Exception):
    """A reward function raised its `__cause__`."""


def invoke(call: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """What the function returns, an awaitable perhaps.  Raises FunctionRaised, ScoringFailure and RunError."""
    try:
        result = call(**arguments)
        return list(result) if isinstance(result, Iterator) else result
    except (ScoringFailure, RunError):
        raise  # a RunError is for the person: no row is at fault, and no score may stand in for it
    except Exception as error:
        raise FunctionError from error


def as_raised(result: object) -> object:
    """What an awaitable came to, an exception told as `invoke` would tell it."""
    if isinstance(result, RunError):
        raise result
    if isinstance(result, BaseException) and not isinstance(result, ScoringFailure):
        failed = FunctionError()
        failed.__cause__ = result
        return failed
    return result
