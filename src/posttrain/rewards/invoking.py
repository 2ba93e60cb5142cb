"""Running a function that a user wrote, where anything may happen; the same in our process and in a worker's."""

from collections.abc import Callable, Iterator, Mapping

from posttrain.errors import RunError
from posttrain.rewards.function import ScoringFailure


class FunctionRaised(Exception):
    """A reward function raised its `__cause__`."""


def invoke(call: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """What the function returns, an awaitable perhaps.  Raises FunctionRaised, ScoringFailure and RunError."""
    try:
        result = call(**arguments)
        return list(result) if isinstance(result, Iterator) else result
    except (ScoringFailure, RunError):
        raise  # a RunError is for the person: no row is at fault, and no score may stand in for it
    except Exception as error:
        raise FunctionRaised from error


def told_apart(result: object) -> object:
    """What an awaitable came to, an exception told as `invoke` would tell it."""
    if isinstance(result, RunError):
        raise result
    if isinstance(result, BaseException) and not isinstance(result, ScoringFailure):
        failed = FunctionRaised()
        failed.__cause__ = result
        return failed
    return result
