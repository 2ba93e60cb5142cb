"""Makes the calls of a round: in the trainer's process in order, others in workers, async ones on a background loop.

A call in the trainer's process cannot be ended: a slow one is reported, and changes to the process are undone.
"""

import asyncio
import functools
import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from posttrain.errors import RunError
from posttrain.rewards.grading.answers import FunctionError, as_raised, invoke, settled
from posttrain.rewards.grading.calls import Call, Deadline, Result, reward_arguments
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import NeedsResources, Resources
from posttrain.rewards.grading.worker import Job, finish_jobs

GRACE_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""How long functions without a deadline may take before a warning names them."""


def dispatch(calls: Sequence[Call], resources: Resources) -> list[Result]:
    """The results of the calls, in their order, on a session's resources."""
    with warning_when_slow(calls):
        results = [None if call.function.settings.workers else call_here(call, resources) for call in calls]
        waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        in_workers: dict[str, dict[int, Call]] = {}
        for index, call in enumerate(calls):
            if call.function.settings.workers:
                in_workers.setdefault(call.function.name, {})[index] = call
        if not waiting and not in_workers:
            return results
        names = names_of(calls[index] for index in waiting)
        started = [(calls[index], results[index]) for index in waiting]
        with requiring_open_stdout(names), restoring_torch_state(), awaiting(started, names) as finished:
            jobs = [
                Job(resources.workers.pool_for(next(iter(of_function.values())).function), of_function)
                for of_function in in_workers.values()
            ]
            finish_jobs(jobs)
            found = dict(zip(waiting, finished(), strict=True))
            for job in jobs:
                found |= job.results
    return [found.get(index, result) for index, result in enumerate(results)]


def names_of(calls: Iterable[Call]) -> str:
    return ", ".join(dict.fromkeys(repr(call.function.name) for call in calls))


def call_here(call: Call, resources: Resources) -> Result:
    """The call's result, its awaitable, or what it raised."""
    refusal = call.bounds.refusal()
    if refusal is not None:
        return refusal
    arguments = reward_arguments(call)
    function: Any = call.function.call
    if isinstance(function, NeedsResources):
        function = function.with_resources(resources)
    try:
        with requiring_open_stdout(repr(call.function.name)), restoring_torch_state():
            return invoke(function, arguments)
    except (ScoringFailure, FunctionError) as failure:
        return failure


@contextmanager
def awaiting(started: Sequence[tuple[Call, Any]], names: str) -> Iterator[Callable[[], list[Result]]]:
    """Run awaitables in the background; yields a function that waits for their results.  Leaving cancels them."""
    if not started:
        yield list
        return
    deadlines = [call.deadline() for call, _ in started]

    async def together() -> list[object]:
        pairs = zip(started, deadlines, strict=True)
        return await asyncio.gather(*(in_time(awaitable, deadline) for (_, awaitable), deadline in pairs))

    future = asyncio.run_coroutine_threadsafe(together(), shared_loop().running())

    def results() -> list[Result]:
        last = max(deadlines, key=lambda deadline: deadline.at).timeout
        try:
            done = future.result(None if last is None else last + GRACE_SECONDS)
        except TimeoutError as error:
            problem = f"reward {names}: cannot be ended at its deadline: it never gives control back to its event loop"
            raise RunError(f"{problem}. Await what is slow (asyncio.sleep, not time.sleep), or set workers.") from error
        return [as_raised(result) for result in done]

    try:
        yield results
    finally:
        future.cancel()  # after an interrupt nothing runs on in the background; otherwise this does nothing


async def in_time(awaitable: Any, deadline: Deadline) -> object:
    """Its result or exception; at the deadline it is cancelled, which is a failure."""
    task = asyncio.ensure_future(settled(awaitable))
    try:  # not wait_for, which waits for functions that ignore being cancelled
        done, _ = await asyncio.wait([task], timeout=deadline.timeout)
    finally:
        task.cancel()  # does nothing to a finished task
    if not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # asyncio warns of exceptions unread
        return ScoringFailure(deadline.says)
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    return task.result() if error is None else error


class LoopThread:
    """An event loop in a background thread, since notebooks already run a loop in theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def running(self) -> asyncio.AbstractEventLoop:
        """The loop; a new one if its thread is dead, as after a fork, or if it was closed."""
        with self._lock:
            alive = self._thread is not None and self._thread.is_alive()
            if self._loop is None or not alive or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=[self._loop], name="async rewards", daemon=True)
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():  # a task that a function has started may stop it, or raise what ends it
            with suppress(SystemExit, KeyboardInterrupt):  # the task has it as its exception already
                loop.run_forever()


@functools.cache
def shared_loop() -> LoopThread:
    """One loop for all steps, since clients that a function keeps belong to the loop that made them."""
    return LoopThread()


@contextmanager
def warning_when_slow(calls: Sequence[Call]) -> Iterator[None]:
    """Warn, after a while, of functions among the calls that have no deadline."""
    endless = [call for call in calls if not call.function.bounded and math.isinf(call.deadline().at)]
    if not endless:
        yield
        return
    message = (
        f"reward {names_of(endless)}: still running after {PATIENCE_SECONDS:g} s, and it has no deadline. To set one,"
        " give it `workers: 1` and `item_seconds` (reward_function(call, workers=1, item_seconds=...) in Python)."
    )
    timer = threading.Timer(PATIENCE_SECONDS, warnings.warn, [message, RuntimeWarning])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def requiring_open_stdout(names: str) -> Iterator[None]:
    closed = stdout_is_closed()
    try:
        yield
    finally:
        if stdout_is_closed() and not closed:
            sys.stdout = sys.stderr  # for what is printed until the end
            remedy = "Leave it open, or set `workers: 1` (reward_function(call, workers=1) in Python)."
            raise RunError(f"reward {names}: closed the standard output, which the run prints to. {remedy}")


def stdout_is_closed() -> bool:
    return sys.stdout is not None and sys.stdout.closed  # a program without a standard output prints nothing


@contextmanager
def restoring_torch_state() -> Iterator[None]:
    """Restore torch's settings that functions may change for the whole thread: gradients, the default type."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)
