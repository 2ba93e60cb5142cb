"""Completions under way at several servers: each request goes to one, and to another where that one fails."""

import asyncio
import math
import queue
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.generation.engine import Sampling, SamplingTimeout
from posttrain.generation.http.completion_requests import CompletionJob, UnsoundAnswer, completions_of, jobs_of
from posttrain.generation.http.server_calls import EventLoop, ServerFault
from posttrain.generation.http.servers import Server, ServerPool
from posttrain.generation.in_process import Place, place_of
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.generation.rl_protocol import RELEASE, ReleaseRequest, Stream, written


class HttpSampling(Sampling):
    """`put`, `take`, `release` and `close` are for the caller's thread; the rest runs in the engine's loop."""

    def __init__(
        self, pool: ServerPool, loop: EventLoop, request: Request, *, stop_ids: Sequence[int], max_positions: int
    ) -> None:
        self.pool, self.loop, self.request, self.closed = pool, loop, request, False
        self.stop_ids, self.max_positions = stop_ids, max_positions
        self.num_open = 0
        self.done: queue.SimpleQueue[list[Sampled] | UserError] = queue.SimpleQueue()
        self.waiting: deque[CompletionJob] = deque()
        self.tasks: dict[str, tuple[asyncio.Task[None], Server, CompletionJob]] = {}
        """What is under way, by the number of its request: an answer whose number is not here any more is dropped."""
        self.background: set[asyncio.Task[None]] = set()
        self.homes: dict[Place, Server] = {}
        """The server that keeps the cache of a conversation."""
        self.first_version = len(pool.versions) - 1
        """The place of the oldest weights that may sample in the pool's `versions`."""

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
        jobs = jobs_of(continuations, grouped=not self.request.keep)
        self.loop.call(self._queue, jobs)

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
            if isinstance(each, UserError):
                raise each
            sampled += each
        self.num_open -= len(sampled)
        return sampled

    def release(self, sampled: Iterable[Sampled]) -> None:
        if self.request.keep and not self.closed:
            self.loop.call(self._release, [each.continuation for each in sampled])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.run(self._end())

    def _require_open(self) -> None:
        if self.closed:
            raise UserError("engine http: this sampling is closed.  Open another one.")

    def _queue(self, jobs: Sequence[CompletionJob]) -> None:
        self.waiting.extend(jobs)
        self._send()

    def _send(self) -> None:
        """Send what is waiting, in order, as long as a server has room."""
        while self.waiting:
            job = self.waiting[0]
            server = self.pool.server_for(job, self.request, self.homes.get(place_of(job.first)))
            if server is None:
                break
            self.waiting.popleft()
            number = self.pool.number()
            server.begin(job)
            body = written(job.body(self.request, self.stop_ids, number))
            task = asyncio.get_running_loop().create_task(self._ask(number, server, job, body))
            self.tasks[number] = task, server, job

    async def _ask(self, number: str, server: Server, job: CompletionJob, body: bytes) -> None:
        try:
            answer = await server.generate("sample", body, number, seconds=self.pool.seconds.sample)
            versions = self.pool.versions[self.first_version :]
            sampled = completions_of(job, answer, self.request, self.stop_ids, versions)
        except UnsoundAnswer as unsound:
            self._give_up(server, ServerFault(server.url, "sample", f"{job.first.label}: {unsound}"), number)
        except ServerFault as fault:
            if fault.asked_wrongly and self._ended(number):
                self.done.put(fault)
            elif number in self.tasks:
                self._give_up(server, fault, number)
        else:
            if self._ended(number):
                if self.request.keep:
                    self.homes |= {place_of(each.continuation): server for each in sampled}
                self.done.put(sampled)
                self._send()

    def _ended(self, number: str) -> bool:
        """Take a request off the list; False where it was given up before."""
        if (found := self.tasks.pop(number, None)) is None:
            return False
        _, server, job = found
        server.end(job)
        return True

    def _give_up(self, server: Server, fault: ServerFault, number: str = "") -> None:
        """Leave a server out, and put all that is under way there to others, each from its prefix."""
        given_up = [(each, task, job) for each, (task, at, job) in self.tasks.items() if at is server]
        for each, task, _ in given_up:
            self._ended(each)
            if each != number:  # which is the caller
                task.cancel()
        self.waiting.extendleft(job for *_, job in reversed(given_up))
        try:
            if server.fault is None:
                self.pool.leave_out(server, fault)
        except RunError as none_left:
            self.done.put(none_left)
        else:
            self._send()

    def _release(self, continuations: Sequence[Continuation]) -> None:
        at: dict[str, list[Continuation]] = {}
        for each in continuations:
            server = self.homes.pop(place_of(each), None)
            if server is not None and server.facts.ours and server.fault is None:
                at.setdefault(server.url, []).append(each)
        for server in (*self.pool.shared, *self.pool.evaluating):
            if server.url in at:
                self._in_background(self._release_at(server, at[server.url]))

    async def _release_at(self, server: Server, continuations: Sequence[Continuation]) -> None:
        keys = ((each, each.key or self.request.key) for each in continuations)
        streams = tuple(
            Stream(seed=key.seed, purpose=key.purpose, step=key.step, draw=each.draw, sample=each.sample)
            for each, key in keys
        )
        body = written(ReleaseRequest(streams=streams))
        try:
            await server.calls.ask("release", "POST", RELEASE, body, seconds=self.pool.seconds.update)
        except ServerFault as fault:
            self._give_up(server, fault)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _end(self) -> None:
        """Cancel what is under way, whose connections are closed by it, and free what is kept."""
        tasks = [task for task, _, _ in self.tasks.values()]
        for number in list(self.tasks):
            self._ended(number)
        self.waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._release(
            [Continuation(prefix=(), draw=draw, sample=sample, limit=0, key=key) for key, draw, sample in self.homes]
        )
        await asyncio.gather(*self.background)
