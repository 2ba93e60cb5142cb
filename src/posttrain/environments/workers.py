"""Threads on which environments reply, each reply with a deadline, and an event loop for those with async methods.

An environment is other people's code: it may raise, return anything, be late or never return.  Each of these becomes an
`Exchange` with a failure; a thread that never returns is abandoned and replaced.

An environment is closed once: when its completion was graded or dropped, and it has no running call.
"""

import asyncio
import inspect
import queue
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from posttrain.environments.protocol import (
    Environment,
    EnvironmentFailure,
    Environments,
    Reply,
    called,
    close_now,
    nothing,
)
from posttrain.errors import RunError
from posttrain.records import Group

GRACE_SECONDS = 0.25
"""Extra wait after a reply's deadline, so that an event loop can end it."""
CLOSING_SECONDS = 1.0
"""How long the end of a session waits for the next environment to close."""
LOOK_SECONDS = 0.1
"""How often late replies are checked for."""

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What the policy said, and what came of it; the first of a completion is its `reset`."""

    said: str = ""
    reply: Reply | None = None
    """None accepts the answer; for `reset`, it adds nothing to the prompt."""
    failure: str = ""
    """The traceback of an environment that failed."""
    seconds: float = 0.0
    """Time until the reply."""


class ReplyJournal(Protocol):
    """Keeps the replies of environments that are not reproducible; a resumed step reads them."""

    def get(self, purpose: str, step: int, draw: int) -> Sequence[Sequence[Exchange]] | None:
        """The exchanges of each completion of a draw, `reset` first; None if that group was not finished."""

    def put(self, purpose: str, step: int, draw: int, exchanges: Sequence[Sequence[Exchange]]) -> None:
        """Keep those of a group that is done, before anything reads it."""

    def keep_failures(self, text: str) -> Path:
        """Keep the tracebacks of failures that end the run, and say where."""


@dataclass(slots=True, eq=False)
class LiveEnvironment:
    """The environment of a completion, until it is closed."""

    made: Environment | None = None
    """None until it is made."""
    num_calls: int = 0
    """Running calls; a late one may outlive its completion."""
    is_over: bool = False
    """Whether it is no longer called or read."""


@dataclass(slots=True, eq=False)
class PendingReply(Generic[Place]):
    """A call of an environment's method."""

    place: Place
    said: str
    live: LiveEnvironment
    call: Callable[[], object]
    read: Callable[[object], Reply | None]
    """Checks what the call returned."""
    answers: "queue.SimpleQueue[tuple[PendingReply[Place], Exchange]]"
    closes: bool = False
    """Whether it is a `close`."""
    began: float = 0.0

    def settle(self, reply: Reply | None = None, failure: str = "") -> None:
        seconds = time.monotonic() - self.began
        self.answers.put((self, Exchange(said=self.said, reply=reply, failure=failure, seconds=seconds)))


class ReplyWorkers:
    """The threads of a session; a context manager."""

    def __init__(self, environments: Environments, journal: ReplyJournal | None = None) -> None:
        self.environments, self.journal = environments, journal
        self.seconds = environments.options.seconds
        self._pending: queue.SimpleQueue[PendingReply[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._running: dict[threading.Thread, PendingReply[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = self._ended = False
        self._alive: dict[int, LiveEnvironment] = {}
        """Environments that must still be closed, by the ids of their objects."""
        self._closings: queue.SimpleQueue[tuple[PendingReply[None], Exchange]] = queue.SimpleQueue()
        self._num_closing = 0

    def ask(self, pending: PendingReply[Any]) -> None:
        self._pending.put(pending)
        with self._lock:
            if len(self._threads) < self.environments.options.workers:
                self._start_thread()

    def made(self, live: LiveEnvironment) -> Environment:
        """Make an environment, in the first call of it."""
        live.made = self.environments.make()
        if hasattr(live.made, "close"):
            with self._lock:
                self._alive[id(live.made)] = live
        return live.made

    def end(self, lives: Sequence[LiveEnvironment]) -> None:
        """These are no longer called or read: close each as soon as it has no running call.

        A call that has not started is skipped.  No caller waits for a `close`, so its failure is a warning.
        """
        with self._lock:
            for live in lives:
                live.is_over = True
            late = self._ask_closes(lives)
        self._close_late(late)
        while self._closed_one(0):
            pass

    def end_of(self, groups: Sequence[Group]) -> None:
        """Close the environments of completions that were graded."""
        objects = [rollout.environment for group in groups for rollout in group.rollouts]
        self.end([live for each in objects if (live := self._alive.get(id(each))) is not None])

    def settle_late(self) -> None:
        """Answer for late replies, saying where they hang; other threads replace theirs."""
        with self._lock:
            overdue = time.monotonic() - self.seconds - GRACE_SECONDS
            for thread, pending in list(self._running.items()):
                if pending.began < overdue:
                    frame = sys._current_frames().get(thread.ident or 0)
                    where = "" if frame is None else "".join(traceback.format_stack(frame))
                    pending.settle(failure=f"{where}TimeoutError: {self._late()}\n")
                    del self._running[thread]
                    self._threads.discard(thread)
                    self._start_thread()

    def close(self) -> None:
        """Close the remaining environments; there are no further replies.  Closing twice does nothing.

        Async calls are cancelled once no `close` is in progress.  An environment whose call has not returned a second
        after the last `close` is left to that call: a warning counts those.
        """
        if self._closed:
            return
        with self._lock:
            self._closed = True
            for _ in self._running:  # which may be for as long as a reply has
                self._start_thread()
            threads, lives = [*self._threads], [*self._alive.values()]
        self.end(lives)
        while self._num_closing and self._closed_one(CLOSING_SECONDS):
            pass
        if self._loop is not None:
            self._loop.call_soon_threadsafe(cancel_tasks, self._loop)
        while (self._alive or self._num_closing) and self._closed_one(CLOSING_SECONDS):
            pass
        with self._lock:
            self._ended, num_left = True, len(self._alive) + self._num_closing
        for _ in threads:
            self._pending.put(None)
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(end_loop(self._loop), self._loop)
        self.environments.close()
        if num_left:
            fault = f"{num_left} still open: a call or a close took longer than {CLOSING_SECONDS:g} second"
            remedy = "Give what they wait for a timeout."
            warnings.warn(f"environment {self.environments.name}: {fault}.  {remedy}", stacklevel=2)

    def require_open(self) -> None:
        """Raises RunError after the session has ended, as in a thread that outlives it."""
        if self._closed:
            raise RunError(f"environment {self.environments.name}: its session has ended, so it no longer replies.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_thread(self) -> None:
        # Daemons: a reply that never returns must not keep the process from ending.
        thread = threading.Thread(target=self._work, name=f"environment {self.environments.name}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (pending := self._pending.get()) is not None:
            with self._lock:
                if not pending.closes and (self._closed or pending.live.is_over):
                    continue
                pending.began = time.monotonic()
                pending.live.num_calls += 1
                self._running[me] = pending
            try:
                reply, failure = called(partial(self._reply_to, pending)), ""
            except EnvironmentFailure as failed:
                reply, failure = None, "".join(traceback.format_exception(failed.__cause__))
            with self._lock:
                if self._running.pop(me, None) is None:
                    return  # it was late, and another thread has taken this one's place
                pending.settle(reply, failure)

    def _reply_to(self, pending: PendingReply[Any]) -> Reply | None:
        reply = pending.read(self._result(pending))
        if time.monotonic() - pending.began > self.seconds:
            raise TimeoutError(self._late())
        return reply

    def _result(self, pending: PendingReply[Any]) -> object:
        returned: object = None
        try:
            returned = pending.call()
        finally:
            if not inspect.isawaitable(returned):
                self._call_ended(pending.live)
        if not inspect.isawaitable(returned):
            return returned

        asked = asyncio.run_coroutine_threadsafe(self._within(returned, pending.live), self._running_loop())
        # Not in a `finally` of the coroutine: one that is cancelled before its first step runs none.
        asked.add_done_callback(lambda _: self._call_ended(pending.live))
        return asked.result(self.seconds + GRACE_SECONDS)

    async def _within(self, returned: Awaitable[object], live: LiveEnvironment) -> object:
        """The result of an async call; at the deadline it is cancelled, and not waited for."""

        async def awaited() -> object:
            return await returned

        with self._lock:
            live.num_calls += 1  # the task may outlive this coroutine
        task = asyncio.ensure_future(awaited())
        task.add_done_callback(lambda _: self._call_ended(live))
        done, _ = await asyncio.wait([task], timeout=self.seconds)
        if not done:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio warns of it
            raise TimeoutError(self._late())
        return task.result()

    def _call_ended(self, live: LiveEnvironment) -> None:
        with self._lock:
            live.num_calls -= 1
            late = self._ask_closes([live])
        self._close_late(late)

    def _ask_closes(self, lives: Sequence[LiveEnvironment]) -> list[LiveEnvironment]:
        """Ask for the `close` of those that are due, each once; returns those that the session no longer closes.

        Called under the lock, so that no `close` is queued after the end of the threads.
        """
        over = [live for live in lives if live.is_over and not live.num_calls]
        due = [live for live in over if self._alive.pop(id(live.made), None) is not None]
        if self._ended:
            return due
        for live in due:
            self._num_closing += 1
            close = getattr(live.made, "close", nothing)
            asked = PendingReply(None, "", live, close, read=lambda _: None, answers=self._closings, closes=True)
            self._pending.put(asked)
        return []

    def _close_late(self, lives: Sequence[LiveEnvironment]) -> None:
        """Close those whose call has returned only after the session; a failure is a warning."""
        for live in lives:
            try:
                called(partial(close_now, getattr(live.made, "close", nothing), self.seconds))
            except EnvironmentFailure as failed:
                self._warn_of_close("".join(traceback.format_exception(failed.__cause__)))

    def _closed_one(self, seconds: float) -> bool:
        """Whether a `close` ended within the time; its failure is a warning."""
        self.settle_late()
        try:
            _, exchange = self._closings.get(timeout=seconds) if seconds else self._closings.get_nowait()
        except queue.Empty:
            return False
        with self._lock:
            self._num_closing -= 1
        if exchange.failure:
            self._warn_of_close(exchange.failure)
        return True

    def _warn_of_close(self, failure: str) -> None:
        warnings.warn(f"environment {self.environments.name}: close failed: {failure}", stacklevel=4)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async environments", daemon=True).start()
            return self._loop

    def _late(self) -> str:
        return f"no reply in {self.seconds:g} seconds (environment.seconds)"


def cancel_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    others = {task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    return others


async def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel running calls and stop, after a second at most."""
    if others := cancel_tasks(loop):
        await asyncio.wait(others, timeout=CLOSING_SECONDS)
    loop.stop()


class Asking(Generic[Place]):
    """The replies that one caller waits for."""

    def __init__(self, workers: ReplyWorkers) -> None:
        self.workers = workers
        self.num_open = 0
        self._answers: queue.SimpleQueue[tuple[PendingReply[Place], Exchange]] = queue.SimpleQueue()

    def ask(
        self,
        place: Place,
        live: LiveEnvironment,
        call: Callable[[], object],
        *,
        said: str = "",
        read: Callable[[object], Reply | None],
    ) -> None:
        self.num_open += 1
        self.workers.ask(PendingReply(place=place, said=said, live=live, call=call, read=read, answers=self._answers))

    def answered(self, seconds: float) -> list[tuple[Place, Exchange]]:
        """The answers that are there, after waiting up to `seconds` for a first one; late ones are failures.

        Raises RunError if the workers are closed meanwhile.
        """
        until = time.monotonic() + seconds
        found: list[tuple[Place, Exchange]] = []
        while self.num_open:
            left = max(until - time.monotonic(), 0)
            try:
                pending, exchange = self._answers.get(timeout=0 if found else min(left, LOOK_SECONDS))
            except queue.Empty:
                self.workers.settle_late()
                if (found or not left) and self._answers.empty():
                    break
                self.workers.require_open()
                continue
            self.num_open -= 1
            found.append((pending.place, exchange))
        return found
