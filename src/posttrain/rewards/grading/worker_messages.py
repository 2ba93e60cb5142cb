"""Messages between us and a worker: JSON that keeps arguments and verdicts exactly, and never code.

To it: first {"place", "name", "path"}, then for each call {"arguments", "one_by_one", "count", "reward", "logs"}, with
{"trainer_state"} where the function asks for it.
From it: {"ready"} or {"refused"}, then for each call {"verdicts"}, {"problem"}, {"raised"}, {"failure"} or {"stop"}.
"""

import json
from typing import Any

from posttrain.errors import RunError
from posttrain.rewards.grading.answers import FunctionError, InvalidScore, Score, Verdict, WorkerAnswer, safe_text
from posttrain.rewards.grading.function import ScoringFailure

MOST_BYTES = 1 << 30
"""Longest message."""
SCALARS = (type(None), bool, int, float, str)


class NotWritableError(Exception):
    """A value that JSON cannot hold."""


class RaisedInWorker(Exception):
    """An exception in a worker; each gets a subclass with its original name."""


def message_bytes(message: object) -> bytes:
    try:
        return json.dumps(message, separators=(",", ":")).encode("ascii")
    except ValueError as error:  # an integer of thousands of digits
        raise NotWritableError(str(error)) from error


def to_json(value: Any) -> Any:
    """A value as JSON in which a tuple differs from a list and a key 1 from a key "1"."""
    if isinstance(value, SCALARS):
        return value
    if type(value) is list:
        return [to_json(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [to_json(item) for item in value]}
    if type(value) is dict:
        return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise NotWritableError(f"a value of type {type(value).__name__}")


def value_from(written: Any) -> Any:
    """The value that `to_json` wrote."""
    if isinstance(written, list):
        return [value_from(item) for item in written]
    if isinstance(written, dict):
        ((kind, parts),) = written.items()
        if kind == "tuple":
            return tuple(value_from(item) for item in parts)
        return {value_from(key): value_from(item) for key, item in parts}
    return written


def verdicts_written(verdicts: list[Verdict] | InvalidScore) -> dict[str, object]:
    if isinstance(verdicts, InvalidScore):
        return {"problem": verdicts.text}
    return {"verdicts": [verdict_written(verdict) for verdict in verdicts]}


def verdict_written(verdict: Verdict) -> list[object]:
    """A verdict as JSON; NaN is a number of Python's JSON."""
    match verdict:
        case Score():
            return ["score", *verdict]
        case InvalidScore(text=text):
            return ["problem", text]
        case failure:
            return ["failure", safe_text(failure, str)]


def verdict_from(written: list[Any]) -> Verdict:
    match written:
        case ["score", *said]:
            return Score(*said)
        case ["problem", text]:
            return InvalidScore(text)
        case [_, text]:
            return ScoringFailure(text)
    raise AssertionError(written)


def result_from(answer: dict[str, Any]) -> WorkerAnswer | FunctionError | ScoringFailure:
    """A call's result, as if the call had been made here.  Raises RunError where the function did."""
    match answer:
        case {"verdicts": verdicts}:
            return WorkerAnswer([verdict_from(verdict) for verdict in verdicts])
        case {"problem": text}:
            return WorkerAnswer(InvalidScore(text))
        case {"failure": text}:
            return ScoringFailure(text)
        case {"raised": [name, text, trace]}:
            failed = FunctionError()
            failed.__cause__ = type(name, (RaisedInWorker,), {})(text)
            failed.__cause__.add_note(trace)
            return failed
        case {"stop": text}:
            raise RunError(text)
    raise AssertionError(answer)
