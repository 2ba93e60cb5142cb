"""Reads what a reward function returned: one finite score per completion, or what is wrong with it.  Loads no torch."""

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from posttrain.errors import RunError
from posttrain.rewards.grading.function import ScoringFailure

EXCERPT = 200
"""Characters of a text that an error shows."""
LARGEST = 1e100
"""Largest number a reward function may give: sums and squares of them stay finite."""
TOO_LARGE = f"too large to be averaged and squared; give at most {LARGEST:g}: divide all scores by a constant"

CUT_OFF = frozenset({"length", "turns"})
"""Reasons why a limit ended a completion, as functions get them."""

Texts = Sequence[str]
Column = Sequence[object]
Given = TypeVar("Given")
Read = TypeVar("Read")


class Score(NamedTuple):
    """A function's verdict on one completion."""

    value: float
    """NaN if it gave no score."""
    outcome: str = ""
    details: Mapping[str, object] | None = None
    extra: Mapping[str, object] | None = None
    """What it logged about this completion, by column."""
    metrics: Mapping[str, float] | None = None
    """What it logged about the call that gave this score, by name."""
    marks: Mapping[str, list[Any]] | None = None
    """Extra rewards as JSON: `tokens`, a number or null each, and `spans` of [start, end, value]."""


@dataclass(frozen=True, slots=True)
class InvalidScore:
    """Why an answer is invalid, for one row or for a whole call."""

    text: str
    cause: BaseException | None = None


class OutOfTime(ScoringFailure):
    """No call was made: no time was left, or too many had failed before."""


Verdict = Score | ScoringFailure | InvalidScore
UNSCORED = Score(math.nan)


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A call's verdicts, already read in a worker."""

    verdicts: list[Verdict] | InvalidScore


@runtime_checkable
class Array(Protocol):
    """An array or tensor of numpy, torch or another library."""

    @property
    def shape(self) -> Any: ...

    def item(self) -> Any: ...


def verdicts_in(result: object, *, one_by_one: bool, count: int) -> list[Verdict] | InvalidScore:
    """One verdict for each of `count` completions, or what is wrong with the whole result."""
    if one_by_one:
        return [read_score(result)]
    wrong = f"{{}} for {count} completions; it must return a list of scores"
    try:
        values = read_safely(score_list, result)
    except FunctionError as failed:
        text = f"returned what cannot be read, {value_and_type(result)},"
        return InvalidScore(wrong.format(text), failed.__cause__)
    if isinstance(values, str):
        return InvalidScore(wrong.format(values))
    if len(values) != count:
        return InvalidScore(f"returned {len(values)} scores for {count} completions; it must return one for each")
    return [read_score(value) for value in values]


def score_list(result: object) -> list[object] | str:
    """The values of a list, or a text about what was returned instead."""
    if isinstance(result, list):
        return result
    if isinstance(result, Set):
        return f"returned {value_and_type(result)}, which has no order,"
    no_lists = (Graded, ProcessReward, str, bytes, bytearray, memoryview, Mapping)
    if isinstance(result, no_lists) or not isinstance(result, Iterable):
        return f"returned {value_and_type(result)}"
    if isinstance(result, Array) and len(result.shape) == 0:
        return "returned a single number"
    return list(result)


def read_score(value: object) -> Verdict:
    """The score that one returned value stands for, or what is wrong with it."""
    outcome, details = "", None
    if isinstance(value, ProcessReward):
        return with_marks(read_score(value.score), value)
    if isinstance(value, Graded):
        details = value.details if isinstance(value, DetailedGrade) else None
        outcome, value = str(value.outcome), value.score
        if not (details is None or is_json(details)):
            return InvalidScore(f"returned details that are not JSON: {value_and_type(details)}")
    if isinstance(value, ScoringFailure):
        return value
    number = finite_score(value)
    if isinstance(number, InvalidScore):
        rule = "A score is a finite number, None where the function does not apply, or a Graded or ProcessReward."
        return InvalidScore(f"returned {number.text}. {rule}", number.cause)
    return Score(math.nan if number is None else number, outcome, details)


def finite_score(value: object) -> float | InvalidScore | None:
    """A value's finite number, None if it stands for none, or what is wrong with it."""
    try:
        number = value if type(value) is float else read_safely(score_number, value)
    except FunctionError as failed:
        if isinstance(failed.__cause__, OverflowError):
            return InvalidScore("a number too large for a float", failed.__cause__)
        return InvalidScore(f"{value_and_type(value)}, which cannot be read", failed.__cause__)
    if isinstance(number, str) or not (number is None or math.isfinite(number)):
        return InvalidScore(value_and_type(value))
    return number if number is None or abs(number) <= LARGEST else InvalidScore(f"{number:g}, {TOO_LARGE}")


def with_marks(said: Verdict, given: "ProcessReward") -> Verdict:
    """The score of a process reward with its marks, or what is wrong with them."""
    if not isinstance(said, Score):
        return said
    if math.isnan(said.value):
        rule = "give 0.0 if only steps pay, and None instead of a ProcessReward if the function does not apply"
        return InvalidScore(f"returned a ProcessReward whose score is None; {rule}")
    tokens, spans = numbers_in("token_rewards", given.token_rewards), spans_in(given.spans)
    if isinstance(tokens, InvalidScore):
        return tokens
    if isinstance(spans, InvalidScore):
        return spans
    return said._replace(marks={"tokens": tokens, "spans": spans} if tokens or spans else None)


def numbers_in(what: str, given: object) -> list[Any] | InvalidScore:
    """The numbers of a list, None for None, or what is wrong with it."""
    try:
        values = read_safely(score_list, given)
    except FunctionError as failed:
        return InvalidScore(f"returned a ProcessReward whose {what} cannot be read", failed.__cause__)
    if isinstance(values, str):
        return InvalidScore(f"{values} as {what}; give a list of numbers, None for no number")
    numbers: list[Any] = []
    for place, value in enumerate(values):
        number = finite_score(value)
        if isinstance(number, InvalidScore):
            rule = "give a finite number, or None for none"
            return InvalidScore(f"returned {what}[{place}] = {number.text}; {rule}", number.cause)
        numbers.append(number)
    return numbers


def spans_in(given: object) -> list[Any] | InvalidScore:
    """The spans of a list as [start, end, value], or what is wrong with it."""
    try:
        spans = read_safely(score_list, given)
    except FunctionError as failed:
        return InvalidScore("returned a ProcessReward whose spans cannot be read", failed.__cause__)
    rule = "give a list of spans, each of start, end and value: the characters [start, end) earn value"
    if isinstance(spans, str):
        return InvalidScore(f"{spans} as spans; {rule}")
    read: list[Any] = []
    for place, span in enumerate(spans):
        numbers = numbers_in(f"spans[{place}]", span)
        whole = isinstance(numbers, list) and len(numbers) == 3 and None not in numbers
        if isinstance(numbers, InvalidScore) or not whole or not all(each.is_integer() for each in numbers[:2]):
            return InvalidScore(f"returned spans[{place}] = {value_and_type(span)}; {rule}")
        read.append([int(numbers[0]), int(numbers[1]), numbers[2]])
    return read


def score_number(value: Any) -> float | str | None:
    """A value's number; None for None and for numpy's masked values; or a text about its type."""
    if value is None:
        return None
    if isinstance(value, Array) and math.prod(value.shape) == 1:
        if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):
            return "a time"  # or a time difference of numpy's, which would pass for a whole number
        if bool(getattr(value, "mask", False)):
            return None
        value = value.item()
    return float(value) if isinstance(value, Real) else "no number"


def is_json(details: object) -> bool:
    try:
        json.dumps(details, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(details, Mapping)


def value_and_type(value: object) -> str:
    text = safe_text(value, repr)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


class Graded(NamedTuple):
    """A score, and how the completion earned or missed it."""

    score: float | None
    """None if the function does not apply to this completion: the score then does not count."""
    outcome: StrEnum
    """Its rate is a metric: a parser's mistake shows as a jump in one outcome, not as a silent zero."""


class DetailedGrade(Graded):
    """A Graded with details."""

    details: Mapping[str, object]
    """Plain JSON, written to the run's scores.jsonl only."""

    def __new__(cls, score: float | None, outcome: StrEnum, details: Mapping[str, object]) -> "DetailedGrade":
        made = super().__new__(cls, score, outcome)
        made.details = details
        return made


class Span(NamedTuple):
    """Characters [start, end) of the graded text, and what they earn."""

    start: int
    end: int
    value: float


class ProcessReward(NamedTuple):
    """A score, and what single tokens or spans of the text earn too, weighted as the score is; both kinds add up."""

    score: "float | Graded"
    """0.0 if only steps pay."""
    token_rewards: Sequence[float | None] = ()
    """Empty, or one for each of `completion_ids`, the stop token included; None if no step ends."""
    spans: Sequence[Span | tuple[int, int, float]] = ()
    """The token that completes a span earns its value; a span inside the prompt's prefill earns nothing."""


class FunctionError(Exception):
    """A reward function raised its `__cause__`."""

    def __init__(self, cause: BaseException | None = None) -> None:
        self.__cause__ = cause


def invoke(call: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """The function's result or awaitable.  Raises FunctionError, ScoringFailure and RunError."""
    try:
        result = call(**arguments)
        return list(result) if isinstance(result, Iterator) else result
    except (ScoringFailure, RunError, KeyboardInterrupt):
        raise  # for the user: no row is at fault, and no score may replace it
    except BaseException as error:  # `sys.exit`, say, would end the run as if it were finished
        raise FunctionError from error


async def settled(awaitable: Awaitable[object]) -> object:
    """The awaitable's result; an exception that would end the shared event loop becomes a FunctionError."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:  # not Ctrl-C, which only the main thread gets
        raise FunctionError from error


def as_raised(result: object) -> object:
    """An awaitable's result; exceptions become what `invoke` raises."""
    if isinstance(result, RunError):
        raise result
    if isinstance(result, BaseException) and not isinstance(result, ScoringFailure | FunctionError):
        return FunctionError(result)
    return result


def read_safely(read: Callable[[Given], Read], value: Given) -> Read:
    """`read(value)` of a user's value; any exception becomes a FunctionError."""
    try:
        return read(value)
    except Exception as error:
        raise FunctionError from error


def safe_text(value: object, read: Callable[[object], str]) -> str:
    """A value's `str` or `repr`, even if its class raises."""
    try:
        return read_safely(read, value)
    except FunctionError as failed:
        return f"<a {type(value).__name__}, whose {read.__name__} raises {type(failed.__cause__).__name__}>"
