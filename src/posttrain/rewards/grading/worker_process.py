"""A worker: a separate interpreter that calls one reward function, one call at a time, until its socket closes.

python -m posttrain.rewards.grading.worker_process PARENT.  Its standard input is the socket.  Its standard output is
the parent's standard error, so a function's prints are shown and never mistaken for an answer.

Messages are JSON that keeps arguments and verdicts exactly, and never code.
To it: first {"place", "name", "path"}, then for each call {"arguments", "one_by_one", "count", "reward", "logs"}, with
{"trainer_state"} if the function wants it.
From it: {"ready"} or {"refused"}, then for each call {"verdicts"}, {"problem"}, {"raised"}, {"failure"} or {"stop"}.
"""

import ctypes
import functools
import inspect
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.rewards.grading import answers
from posttrain.rewards.grading.call_log import CallLog
from posttrain.rewards.grading.function import ScoringFailure, TrainerState, function_at
from posttrain.sandbox.inside import frames

PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 1.0
LONGEST_TEXT = 20_000
"""Characters of an exception's text and traceback."""
MOST_BYTES = 1 << 30
SCALARS = (type(None), bool, int, float, str)


class NotWritableError(Exception):
    """A value that JSON cannot hold."""


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


def verdicts_written(verdicts: list[answers.Verdict] | answers.InvalidScore) -> dict[str, object]:
    """Verdicts as JSON, in which NaN is a number of Python's."""
    if isinstance(verdicts, answers.InvalidScore):
        return {"problem": verdicts.text}
    written: list[list[object]] = []
    for verdict in verdicts:
        match verdict:
            case answers.Score():
                written.append(["score", *verdict])
            case answers.InvalidScore(text=text):
                written.append(["problem", text])
            case failure:
                written.append(["failure", answers.safe_text(failure, str)])
    return {"verdicts": written}


def result_from(answer: dict[str, Any]) -> answers.WorkerAnswer | answers.FunctionError | ScoringFailure:
    """A call's result, as if the call had been made here.  Raises RunError if the function did."""
    match answer:
        case {"verdicts": verdicts}:
            kinds: dict[str, Callable[..., answers.Verdict]] = {
                "score": answers.Score,
                "problem": answers.InvalidScore,
                "failure": ScoringFailure,
            }
            return answers.WorkerAnswer([kinds[kind](*said) for kind, *said in verdicts])
        case {"problem": text}:
            return answers.WorkerAnswer(answers.InvalidScore(text))
        case {"failure": text}:
            return ScoringFailure(text)
        case {"raised": [name, text, trace]}:
            cause = type(name, (Exception,), {})(text)
            cause.add_note(trace)
            return answers.FunctionError(cause)
        case {"stop": text}:
            raise RunError(text)
    raise AssertionError(answer)


def serve_calls() -> None:
    """Load the function, then answer calls."""
    die_with(int(sys.argv[1]))
    channel = socket.socket(fileno=os.dup(0))
    os.dup(0)  # never closed, so that the socket ends with the process, not while it is still shutting down
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        source = json.loads(frames.receive(channel, most=MOST_BYTES))
        sys.path[:] = source["path"]
        try:
            call: Any = function_at(source["place"], source["name"])
        except UserError as error:
            frames.send(channel, message_bytes({"refused": str(error)}))
            return
        frames.send(channel, message_bytes({"ready": os.getpid()}))
        while True:
            request = json.loads(frames.receive(channel, most=MOST_BYTES))
            frames.send(channel, message_bytes(answer_request(call, request)), most=MOST_BYTES)
    except (frames.ChannelClosed, ConnectionError):
        os._exit(0)  # whatever threads the function has started


def answer_request(call: Callable[..., object], request: dict[str, Any]) -> dict[str, object]:
    """Make a call and give its answer."""
    arguments = {name: value_from(written) for name, written in request["arguments"].items()}
    log = CallLog(request["reward"], request["count"])
    arguments |= {name: take for name, take in log.arguments().items() if name in request["logs"]}
    if "trainer_state" in request:
        arguments["trainer_state"] = TrainerState(**request["trainer_state"])
    try:
        result = answers.invoke(call, arguments)
        if inspect.isawaitable(result):
            result = answers.as_raised(awaited(result))
    except (ScoringFailure, answers.FunctionError) as failure:
        result = failure
    except KeyboardInterrupt as error:  # raised by the function: a worker has no terminal
        result = answers.FunctionError(error)
    except RunError as error:
        return {"stop": str(error)}
    if log.problem:  # which the function has caught
        return {"stop": log.problem}
    if isinstance(result, ScoringFailure):
        return {"failure": answers.safe_text(result, str)}
    if isinstance(result, answers.FunctionError):
        cause = result.__cause__
        trace = "".join(traceback.format_exception(cause))
        return {"raised": [type(cause).__name__, answers.safe_text(cause, str)[:LONGEST_TEXT], trace[-LONGEST_TEXT:]]}
    read = answers.verdicts_in(result, one_by_one=request["one_by_one"], count=request["count"])
    return verdicts_written(log.kept_with(read))


def awaited(awaitable: Awaitable[object]) -> object:
    import asyncio  # half of a worker's start time

    async def result() -> object:
        (one,) = await asyncio.gather(answers.settled(awaitable), return_exceptions=True)
        return one

    return loop().run_until_complete(result())


@functools.cache
def loop() -> Any:
    """One event loop for all calls: clients that a function keeps belong to the loop that made them."""
    import asyncio

    return asyncio.new_event_loop()


def die_with(parent: int) -> None:
    """End with the parent process, however that ends; on Linux, with the thread that started this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)
    else:  # no signal at a parent's end
        threading.Thread(target=watch, args=(parent,), daemon=True).start()


def watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    serve_calls()
