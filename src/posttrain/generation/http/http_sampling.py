"""Completions in progress on several servers: each request goes to one, and to another if that one fails."""

import asyncio
import math
import queue
from collections import defaultdict, deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.generation.engine import Sampling, SamplingTimeout
from posttrain.generation.http.completion_requests import (
    Allowed,
    CompletionJob,
    UnsoundAnswer,
    completions_of,
    jobs_of,
    stream_of,
)
from posttrain.generation.http.server_calls import EventLoop, ServerFault
from posttrain.generation.http.servers import Server, ServerPool
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.generation.rl_protocol import RELEASE, GenerateRequest, ReleaseRequest, Stream, written

MOST_RELEASED = 10_000
"""Streams of one request, which is then about a megabyte."""


class HttpSampling(Sampling):
    """`put`, `take`, `release` and `close` are for the caller's thread; the rest runs in the engine's loop."""

    def __init__(
        self, pool: ServerPool, loop: EventLoop, request: Request, allowed: Allowed, *, max_positions: int
    ) -> None:
        self.pool, self.loop, self.request, self.closed = pool, loop, request, False
        self.allowed, self.max_positions = allowed, max_positions
        self.num_open = 0
        self.done: queue.SimpleQueue[list[Sampled] | BaseException] = queue.SimpleQueue()
        self.waiting: deque[CompletionJob] = deque()
        self.tasks: dict[str, tuple[asyncio.Task[None], Server, CompletionJob]] = {}
        """Requests in progress, by number; an answer whose number is no longer here is dropped."""
        self.background: set[asyncio.Task[None]] = set()
        self.homes: dict[Stream, Server] = {}
        """The server that keeps the cache of a conversation."""
        self.first_version = len(pool.versions) - 1
        """The place of the oldest weights that may sample in the pool's `versions`."""
        pool.samplings.add(self)

    def put(self, continuations: Sequence[Continuation]) -> None:
        self._require_open()
        context = self.max_positions
        for each in continuations:
            room = context - len(each.prefix)
            if not each.prefix or not 1 <= each.limit <= room:
                given = f"a prefix of {len(each.prefix)} tokens and limit = {each.limit}"
                fault = f"{each.label}: {given}, in a context of {context}"
                raise UserError(f"{fault}.  Give at least 1 token, and a limit of 1 to {max(room, 1)}.")
        self.num_open += len(continuations)
        jobs = jobs_of(continuations, self.request)
        self.loop.call(self._in_background, self._queue(jobs))

    def take(self, seconds: float) -> list[Sampled]:
        self._require_open()
        if not self.num_open:
            raise UserError("engine http: take: nothing is open.  Put continuations first.")
        try:
            found = [self.done.get(timeout=None if math.isinf(seconds) else seconds)]
            while not self.done.empty():
                found.append(self.done.get_nowait())
        except queue.Empty:
            raise SamplingTimeout("http", seconds, self.num_open) from None
        sampled: list[Sampled] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            sampled += each
        self.num_open -= len(sampled)
        return sampled

    def release(self, sampled: Iterable[Sampled]) -> None:
        if self.request.keep and not self.closed:
            self.loop.call(self._release, [stream_of(each.continuation, self.request) for each in sampled])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.run(self._end())

    def _require_open(self) -> None:
        if self.closed:
            raise UserError("engine http: this sampling is closed.  Open another one.")

    def leave(self, server: Server) -> None:
        """Send everything in progress at a server to others, each from its prefix."""
        given_up = [(each, task, job) for each, (task, at, job) in self.tasks.items() if at is server]
        for each, task, _ in given_up:
            self._ended(each)
            if task is not asyncio.current_task():
                task.cancel()
        self.waiting.extendleft(job for *_, job in reversed(given_up))

    def fail(self, error: RunError) -> None:
        """`take` raises it."""
        self.done.put(error)

    async def _queue(self, jobs: Sequence[CompletionJob]) -> None:
        self.waiting.extend(jobs)
        self.send()

    def send(self) -> None:
        """Send what is waiting, in order, as long as a server has room."""
        while self.waiting:
            job = self.waiting[0]
            server = self.pool.server_for(job, self.request, self.homes.get(stream_of(job.first, self.request)))
            if server is None:
                break
            self.waiting.popleft()
            number = self.pool.number()
            server.begin(job)
            asked = job.body(self.request, self.allowed.stop_ids, number)
            self.tasks[number] = self._task(self._ask(server, job, asked)), server, job

    async def _ask(self, server: Server, job: CompletionJob, asked: GenerateRequest) -> None:
        number = asked.request_id
        try:
            answer = await server.generate("sample", asked, seconds=self.pool.seconds.sample)
            allowed = replace(self.allowed, versions=self.pool.versions[self.first_version :])
            sampled = completions_of(job, answer, self.request, allowed)
        except UnsoundAnswer as unsound:
            self._leave_out(server, ServerFault(server.url, "sample", f"{job.first.label}: {unsound}"))
        except ServerFault as fault:
            if number in self.tasks:
                self._leave_out(server, fault)
        else:
            if self._ended(number):
                if self.request.keep:
                    self.homes |= {stream_of(each.continuation, self.request): server for each in sampled}
                self.done.put(sampled)
                self.pool.send()

    def _ended(self, number: str) -> bool:
        """Take a request off the list; False if it was given up before."""
        if (found := self.tasks.pop(number, None)) is None:
            return False
        _, server, job = found
        server.end(job)
        return True

    def _leave_out(self, server: Server, fault: ServerFault) -> None:
        if server.fault is None:
            with suppress(RunError):  # none is left, which `fail` has put to all samplings
                self.pool.leave_out(server, fault)

    def _release(self, streams: Iterable[Stream]) -> None:
        at: defaultdict[Server, list[Stream]] = defaultdict(list)
        for each in streams:
            server = self.homes.pop(each, None)
            if server is not None and server.facts.ours and server.fault is None:
                at[server].append(each)
        for server, its in at.items():
            for first in range(0, len(its), MOST_RELEASED):
                self._in_background(self._release_at(server, its[first : first + MOST_RELEASED]))

    async def _release_at(self, server: Server, streams: Sequence[Stream]) -> None:
        body = written(ReleaseRequest(streams=tuple(streams)))
        try:
            await server.calls.ask("release", RELEASE, body, seconds=self.pool.seconds.update)
        except ServerFault as fault:
            self._leave_out(server, fault)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work here; `take` raises its errors."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.done.put(error)

    async def _end(self) -> None:
        """Cancel the requests in progress, which closes their connections, and free the caches."""
        self.pool.samplings.discard(self)
        tasks = [task for task, _, _ in self.tasks.values()]
        for number in list(self.tasks):
            self._ended(number)
        self.waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.pool.send()
        self._release([*self.homes])
        await asyncio.gather(*self.background)
