"""Reading what a reward function returned: one finite score per completion, or an error that names the row."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch

from posttrain.errors import RunError
from posttrain.rewards.calling import Call, FunctionRaised, Result, Row
from posttrain.rewards.function import ScoringFailure
from posttrain.rewards.graded import Graded

RULE = "A score is a finite number, None where the function does not apply, or a Graded."
EXCERPT = 200
"""Characters of a completion that an error shows."""


class Score(NamedTuple):
    """What a function said of one completion."""

    value: float
    """NaN where it said nothing."""
    outcome: str = ""
    """How the completion fared, where the function tells."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a function's answer, for one row or for a whole call."""

    text: str
    cause: BaseException | None = None


Verdict = Score | ScoringFailure | Problem
UNSCORED = Score(math.nan)


def read(call: Call, result: Result) -> list[Verdict] | Problem:
    """One verdict per row of the call, or what is wrong with all of them together."""
    if isinstance(result, ScoringFailure):
        return [result] * len(call.rows)
    if isinstance(result, FunctionRaised):
        cause = result.__cause__
        return Problem(f"raised {type(cause).__name__}: {str(cause)[:EXCERPT]}", cause)
    if call.wanted.one_by_one:
        return [verdict(result)]
    if isinstance(result, Graded | str | bytes | Mapping) or not isinstance(result, Iterable):
        return Problem(f"returned {shown(result)} for {len(call.rows)} completions; it must return a list of scores")
    if isinstance(result, np.ndarray | torch.Tensor) and result.ndim == 0:
        return Problem(f"returned a single number for {len(call.rows)} completions; it must return a list of scores")
    values = list(result)
    if len(values) != len(call.rows):
        return Problem(f"returned {len(values)} scores for {len(call.rows)} completions; it must return one for each")
    return [verdict(value) for value in values]


def verdict(value: object) -> Verdict:
    """The score that one returned value stands for."""
    outcome = ""
    if isinstance(value, Graded):
        outcome, value = str(value.outcome), value.score
    if value is None:
        return Score(math.nan, outcome)
    if isinstance(value, ScoringFailure):
        return value
    if isinstance(value, np.ndarray | np.generic | torch.Tensor) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real):
        return Problem(f"returned {shown(value)}. {RULE}")
    try:
        number = float(value)
    except OverflowError as error:
        return Problem(f"returned a number too large for a float. {RULE}", error)
    return Score(number, outcome) if math.isfinite(number) else Problem(f"returned {number}. {RULE}")


def shown(value: object) -> str:
    """A value of the wrong kind, in few words."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


def stop(call: Call, problem: Problem, row: Row | None) -> RunError:
    """The error that stops the run, with the row where it is known; to be raised from the problem's cause."""
    where = f"reward {call.function.name!r}"
    if row is None:
        return RunError(f"{where} {problem.text}")
    return RunError(
        f"{where}, prompt {row.group.prompt.id!r}, sample {row.rollout.sample}: {problem.text}"
        f"\n    The completion: {excerpt(row.text)}"
        '\n    To go on without such scores use on_error="none": they are then left out and counted.'
    )


def excerpt(text: str) -> str:
    """The beginning and the end of a text, on one line and safe to print."""
    if len(text) > EXCERPT:
        return f"{text[: EXCERPT // 2]!a} … {text[-EXCERPT // 2 :]!a} ({len(text)} characters)"
    return ascii(text)
