"""The servers of an engine, and which one a request goes to."""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from posttrain.errors import RunError
from posttrain.generation.http.completion_requests import CompletionJob, num_logprobs
from posttrain.generation.http.server_calls import MOST_ANSWER_BYTES, ServerCalls, ServerFault
from posttrain.generation.request import Request
from posttrain.generation.rl_protocol import GENERATE, Facts, GenerateRequest, GenerateResponse, written
from posttrain.options.rollout import HttpSeconds

OVERBOOKED = 2
"""Completions in progress at a server, as a multiple of those that it decodes at once: it never waits for us."""
TOKEN_BYTES = 512
"""More than a log-prob with its token takes in an answer: it is about 80."""


@dataclass(slots=True, eq=False)
class Server:
    """One server and its requests in progress; changed only in the loop's thread."""

    calls: ServerCalls
    facts: Facts
    fault: ServerFault | None = None
    """Why it is left out until the next update."""
    rows: int = 0
    """Completions in progress."""
    tokens: int = 0
    """The most tokens that they can hold at their ends."""

    paused_seconds: float = 0.0
    """How long the last update kept it from sampling."""

    @property
    def url(self) -> str:
        return self.calls.url

    async def generate(self, phase: str, asked: GenerateRequest, *, seconds: float) -> GenerateResponse:
        """The answer to a request.  Raises ServerFault, also where it is another's."""
        most = MOST_ANSWER_BYTES + TOKEN_BYTES * num_logprobs(asked)
        answer = await self.calls.ask_for(
            GenerateResponse, phase, GENERATE, written(asked), seconds=seconds, most_bytes=most
        )
        if not answer.request_id.endswith(asked.request_id):
            fault = f"an answer to {answer.request_id[:60]!r}; the request was {asked.request_id}"
            raise ServerFault(self.url, phase, fault)
        return answer

    def has_room_for(self, job: CompletionJob) -> bool:
        return self.rows == 0 or self.rows + len(job.continuations) <= OVERBOOKED * self.facts.max_rows

    def begin(self, job: CompletionJob) -> None:
        self.rows += len(job.continuations)
        self.tokens += job.num_tokens

    def end(self, job: CompletionJob) -> None:
        self.rows -= len(job.continuations)
        self.tokens -= job.num_tokens


class PooledSampling(Protocol):
    """A sampling over a pool's servers; called in the loop's thread."""

    def send(self) -> None:
        """Send what is waiting as long as a server has room."""

    def leave(self, server: Server) -> None:
        """Take back the requests in progress at a server."""

    def fail(self, error: RunError) -> None:
        """End with an error."""


class ServerPool:
    """The servers that completions are shared out among, and the one that evaluates."""

    def __init__(self, servers: Sequence[Server], num_shared: int, seconds: HttpSeconds) -> None:
        """The first `num_shared` servers sample for training; the one after them samples for evaluations only."""
        self.shared, self.evaluating = servers[:num_shared], servers[num_shared:]
        self.seconds = seconds
        self.versions: list[int] = []
        """Versions of the weights that were sent, in order; they may sample before `load` returns."""
        self.samplings: set[PooledSampling] = set()
        """The open samplings."""
        self._name, self._numbers = secrets.token_hex(4), count()

    def number(self) -> str:
        """A name for one request, which its answer repeats."""
        return f"{self._name}-{next(self._numbers)}"

    def servers_for(self, request: Request) -> Sequence[Server]:
        """The servers that a request's completions are distributed to."""
        evaluates = request.key.purpose == "evaluation" and any(each.fault is None for each in self.evaluating)
        return self.evaluating if evaluates else self.shared

    def server_for(self, job: CompletionJob, request: Request, home: Server | None) -> Server | None:
        """Its conversation's server, else the one with the fewest tokens in progress; None if all are full."""
        if home is not None and home.fault is None:
            return home
        free = [each for each in self.servers_for(request) if each.fault is None and each.has_room_for(job)]
        return min(free, key=lambda each: each.tokens) if free else None

    def leave_out(self, server: Server, fault: ServerFault) -> None:
        """Leave a server out until the next update, say so, and send its requests in progress to others.

        Raises RunError if none is left, and all samplings end with it.
        """
        server.fault = fault
        for each in list(self.samplings):
            each.leave(server)
        if all(each.fault is not None for each in self.shared):
            faults = "\n  ".join(str(each.fault) for each in self.shared)
            none_left = RunError(f"engine http: no server is left:\n  {faults}\nRepair one and resume the run.")
            for each in list(self.samplings):
                each.fail(none_left)
            raise none_left
        print(f"{fault}  It is left out until the next update.", file=sys.stderr, flush=True)
        self.send()

    def send(self) -> None:
        """There is room, or another server: send the waiting requests of all samplings."""
        for each in list(self.samplings):
            each.send()
