"""Awaiting what asynchronous reward functions return: all at once, each until its deadline, on a loop of their own."""

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from posttrain.errors import RunError
from posttrain.rewards.grading.answers import as_raised, settled
from posttrain.rewards.grading.calls import Call, Deadline, Result
from posttrain.rewards.grading.function import ScoringFailure

GRACE_SECONDS = 5.0
"""How long after the last deadline a loop that gives no sign of life is waited for."""


@dataclass(frozen=True, slots=True)
class AsyncCall:
    """A call that returned an awaitable."""

    call: Call
    awaitable: Any


@contextmanager
def start_async_calls(waiting: Sequence[AsyncCall]) -> Iterator[Callable[[], list[Result]]]:
    """Have them run in the background; in the end ask for their results, or leave and they are cancelled."""
    if not waiting:
        yield list
        return
    deadlines = [each.call.deadline() for each in waiting]
    names = ", ".join(dict.fromkeys(repr(each.call.function.name) for each in waiting))

    async def together() -> list[object]:
        pairs = zip(waiting, deadlines, strict=True)
        return await asyncio.gather(*(in_time(each.awaitable, deadline) for each, deadline in pairs))

    future = asyncio.run_coroutine_threadsafe(together(), shared_loop().running())

    def results() -> list[Result]:
        last = max(deadlines, key=lambda deadline: deadline.at).left()
        try:
            done = future.result(None if last == float("inf") else max(0.0, last) + GRACE_SECONDS)
        except TimeoutError as error:
            raise RunError(
                f"reward {names}: nothing can end it at its deadline, as it never gives control back to its event loop."
                "  Await what takes long (asyncio.sleep and not time.sleep), or give it workers."
            ) from error
        return [as_raised(result) for result in done]

    try:
        yield results
    finally:
        future.cancel()  # after an interrupt nothing goes on in the background; else this does nothing


async def in_time(awaitable: Any, deadline: Deadline) -> object:
    """What it comes to, an exception included; a failure where the deadline comes first, and it is then cancelled."""
    task = asyncio.ensure_future(settled(awaitable))
    left = deadline.left()
    try:
        # Not wait_for, which waits for as long as a function takes that does not want to be cancelled.
        done, _ = await asyncio.wait([task], timeout=None if left == float("inf") else max(0.0, left))
    finally:
        task.cancel()  # does nothing to what is done
    if not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # so that nobody misses it
        return ScoringFailure(deadline.says)
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    return task.result() if error is None else error


class LoopThread:
    """An event loop in a thread of its own, since notebooks already run a loop in theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def running(self) -> asyncio.AbstractEventLoop:
        """The loop; another where its thread is dead, as after a fork, or where somebody has closed it."""
        with self._lock:
            alive = self._thread is not None and self._thread.is_alive()
            if self._loop is None or not alive or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=run_on, args=[self._loop], name="async rewards", daemon=True)
                self._thread.start()
            return self._loop


def run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is closed: a task that a function has started may stop it, or raise what ends it."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):  # the task has it as its exception already
            loop.run_forever()


@functools.cache
def shared_loop() -> LoopThread:
    """One loop for all steps, since clients that a function keeps belong to the loop they were made in."""
    return LoopThread()
