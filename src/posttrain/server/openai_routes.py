"""OpenAI's routes: one model, which samples for all requests at the same time."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from posttrain.errors import RunError, UserError
from posttrain.generation.engine import rollouts_of
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import USUAL_TOKENS, engine_in_parity
from posttrain.generation.request import Continuation, Request as SamplingRequest, Sampled, StreamKey
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.server import requests
from posttrain.server.application import route
from posttrain.server.openai_answers import Heading, Json, StreamedChoice, usage, whole_choice
from posttrain.server.openai_requests import CompletionRequest, read_completion_request
from posttrain.server.requests import RETRY_LATER, Access, RefusedRequest
from posttrain.server.sampler import Ended, Sampler, SamplingJob

MAX_ROWS = 256
"""Number of completions decoded at the same time."""
PATIENCE_SECONDS = 30.0
"""Extra seconds after a request's time limit before it counts as hanging, since a model step takes time."""
CHUNK_SECONDS = 0.02
"""Chunks are sent at multiples of this, those of all answers in one pass: sending many more takes longer than a small
model takes to sample them."""
STREAMS_IN_A_PASS = 10
"""With more requests, passes are rarer in proportion, so that the share of time for sending is bounded."""
RAREST_PASS = 5.0
"""In multiples of `CHUNK_SECONDS`."""
SMALL_BODY = 4096
"""Bytes of a body that is read without a change of threads: each change may wait for the sampler's thread."""
FEW_TEXTS = 512
"""Tokens, with their alternatives, that are decoded without one."""
MAX_REQUESTS = 1024
"""Maximum number of OpenAI requests in progress or waiting."""


class Service:
    """A policy that answers requests."""

    def __init__(
        self,
        policy: Policy,
        renderer: TokenizerRenderer,
        *,
        name: str,
        seconds: float,
        max_rows: int = MAX_ROWS,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self.sampler = Sampler(served_engine(policy, max_rows))
        self.max_requests, self.num_requests = max_requests, 0
        self.policy, self.renderer, self.name, self.seconds = self.engine.policy, renderer, name, seconds
        self.began = int(time.time())
        self.reading = asyncio.Lock()
        """Held while a large request is tokenised, which takes memory: one at a time."""

    @property
    def engine(self) -> InProcessEngine:
        return self.sampler.engine

    def require_idle(self) -> None:
        if self.sampler.num_open:
            raise RefusedRequest("completions are in progress.  Pause with mode=wait first", HTTPStatus.CONFLICT)

    def begin_anew(self, policy: Policy) -> None:
        """Sample from another policy.  Raises RefusedRequest if completions are in progress."""
        self.require_idle()
        self.sampler.close_idle()
        self.sampler.engine = served_engine(policy, self.engine.max_rows)
        self.policy = self.engine.policy

    def routes(self, access: Access) -> list[Route]:
        """The routes, with or without a final slash."""
        checked = access.checked
        return [
            route(method, path + end, endpoint)
            for end in ("", "/")
            for method, path, endpoint in (
                ("GET", "/health", checked(self.health, needs_token=False)),
                ("GET", "/v1/models", checked(self.models)),
                ("GET", "/v1/models/{name:path}", checked(self.named_model)),
                ("POST", "/v1/completions", checked(self.completions)),
                ("POST", "/v1/chat/completions", checked(self.chat_completions)),
            )
        ]

    def model(self, name: object) -> dict[str, Any]:
        """The model by its name.  Raises RefusedRequest for other names."""
        if name != self.name:
            only = f"model = {requests.brief(name)}: no such model.  Use `{self.name}`"
            raise RefusedRequest(only, HTTPStatus.NOT_FOUND)
        return {"id": self.name, "object": "model", "created": self.began, "owned_by": "posttrain"}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model(self.name)]})

    async def named_model(self, request: Request) -> Response:
        return JSONResponse(self.model(request.path_params["name"].rstrip("/")))

    async def health(self, request: Request) -> Response:
        """The state of the engine.  A request over its time limit ends at the next check; else the engine hangs."""
        began, now, waiting = self.sampler.began_at, time.monotonic(), len(self.sampler.waiting)
        state = "paused" if self.sampler.paused else "idle" if began is None else "sampling"
        hangs = state == "sampling" and began is not None and now - began > self.seconds + PATIENCE_SECONDS
        said: dict[str, str | float] = {"status": "hangs" if hangs else "ok", "engine": state, "waiting": waiting}
        if began is not None:
            since_token = round(now - self.sampler.last_token_at, 3)
            said |= {"seconds": round(now - began, 3), "seconds_since_token": since_token}
        return JSONResponse(said, HTTPStatus.SERVICE_UNAVAILABLE if hangs else HTTPStatus.OK)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = await requests.json_object(request)
        if body.get("model") is not None:
            self.model(body["model"])
        with ExitStack() as ending:
            ending.enter_context(self._place())
            asked = await self._read(request, body, chat=chat)
            if asked.stream:
                return await self._stream(request, asked, ending)
            sampled = await self.sampled(request, self.sampler.submit(*continuations_of(asked, self.policy)))
            num_texts = sum(len(each.tokens) for each in sampled) * (1 + (asked.logprobs or 0))
            if num_texts <= FEW_TEXTS:
                return JSONResponse(self._whole(asked, sampled))
            return JSONResponse(await run_in_threadpool(self._whole, asked, sampled))

    async def _read(self, request: Request, body: Json, *, chat: bool) -> CompletionRequest:
        """The request, checked and tokenised."""
        if int(request.headers.get("Content-Length", SMALL_BODY + 1)) <= SMALL_BODY:
            return read_completion_request(body, self.policy, self.renderer, chat=chat)
        async with self.reading:
            return await run_in_threadpool(read_completion_request, body, self.policy, self.renderer, chat=chat)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """A place among the requests in progress or waiting.  Raises RefusedRequest if none is free."""
        if self.num_requests >= self.max_requests:
            full = f"the limit of {self.num_requests} requests in progress or waiting is reached.  Try again later"
            raise RefusedRequest(full, HTTPStatus.TOO_MANY_REQUESTS, RETRY_LATER)
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def sampled(self, request: Request, job: SamplingJob) -> list[Sampled]:
        """The completions of a job, in order.  The job ends if the client leaves."""
        try:
            with refusing():
                result = asyncio.wrap_future(job.result)
                found: list[Sampled] = await requests.while_client_waits(
                    request, result, lambda: self._seconds_left(job)
                )
        finally:
            self.sampler.cancel(job)
        return found

    def _seconds_left(self, job: SamplingJob) -> float:
        """Seconds left for an unfinished job.  Raises RefusedRequest if its time is over."""
        began = job.began_at
        left = (job.asked_at if began is None else began) + self.seconds - time.monotonic()
        if left > 0:
            return left
        if began is None:
            busy = f"busy with earlier requests for {self.seconds:g} seconds.  Try again later"
            raise RefusedRequest(busy, HTTPStatus.SERVICE_UNAVAILABLE, RETRY_LATER)
        long = f"not finished in {self.seconds:g} seconds.  Ask for fewer or shorter completions"
        raise RefusedRequest(long, HTTPStatus.SERVICE_UNAVAILABLE)

    def _whole(self, asked: CompletionRequest, sampled: Sequence[Sampled]) -> Json:
        rollouts = rollouts_of(self.engine, sampled)
        choices = [
            {"index": index, **whole_choice(rollout, asked, self.policy.tokenizer)}
            for index, rollout in enumerate(rollouts)
        ]
        num_sampled = sum(rollout.num_sampled for rollout in rollouts)
        return {**Heading(self.name, chat=asked.chat).over(choices), "usage": usage(asked, num_sampled)}

    async def _stream(self, request: Request, asked: CompletionRequest, ending: ExitStack) -> Response:
        """The answer in chunks.  An error before the first chunk is an ordinary rejection."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:  # called by the sampler's thread
            if not news.is_set():
                loop.call_soon_threadsafe(news.set)

        job = self.sampler.submit(*continuations_of(asked, self.policy), tell)
        ending.callback(self.sampler.cancel, job)
        job.result.add_done_callback(lambda _: tell())
        chunks = self._chunks(asked, job, news)
        first: list[Json] = await requests.while_client_waits(request, anext(chunks))
        return EventStream(events(first, chunks), ending.pop_all().close)

    async def _chunks(
        self, asked: CompletionRequest, job: SamplingJob, news: asyncio.Event
    ) -> AsyncIterator[list[Json]]:
        """Chunks as tokens are sampled, for all choices that have grown since the last ones."""
        heading, no_usage = Heading(self.name, chat=asked.chat), {"usage": None} if asked.stream_usage else {}
        under_way = [
            (each, StreamedChoice(index, asked, self.policy.tokenizer)) for index, each in enumerate(job.continuations)
        ]
        while under_way:
            with refusing():
                await self._wait_for(news, job)
            said = [chunk for each, choice in under_way if (chunk := self._next(choice, job, each)) is not None]
            under_way = [(each, choice) for each, choice in under_way if not choice.ended]
            chunks = [{**heading.over([chunk], chunk=True), **no_usage} for chunk in said]
            if asked.stream_usage and not under_way:
                num_sampled = sum(len(each.tokens) for each in job.done.values())
                chunks.append({**heading.over([], chunk=True), "usage": usage(asked, num_sampled)})
            job.due = self._pass_after(time.monotonic()) if chunks else 0.0  # soon, if all text is held back
            if chunks:
                yield chunks

    def _pass_after(self, seconds: float) -> float:
        """The time of the first pass after this one, the same for all answers."""
        period = CHUNK_SECONDS * min(RAREST_PASS, max(1.0, self.num_requests / STREAMS_IN_A_PASS))
        return (seconds // period + 1) * period if period else seconds

    async def _wait_for(self, news: asyncio.Event, job: SamplingJob) -> None:
        """Wait for news of a job.  Raises the error that ended it early."""
        while not news.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_left(job)):
                    await news.wait()
        news.clear()
        if job.result.done():
            job.result.result()
        else:
            self._seconds_left(job)

    def _next(self, choice: StreamedChoice, job: SamplingJob, continuation: Continuation) -> Json | None:
        sampled = job.done.get(id(continuation))
        if sampled is None:
            return choice.grown(job.tokens.get(id(continuation), ()))
        return choice.finished(*rollouts_of(self.engine, [sampled]))


class EventStream(StreamingResponse):
    """Server-sent events; `end` is called when all are sent, or when the client has left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()


async def events(first: list[Json], others: AsyncIterator[list[Json]]) -> AsyncIterator[bytes]:
    """Chunks as events; an error is the last event."""
    try:
        yield event_of(*first)
        async for chunks in others:
            yield event_of(*chunks)
        yield b"data: [DONE]\n\n"
    except RefusedRequest as error:
        yield event_of(error.content)
    except Exception:
        yield event_of(requests.server_fault().content)
        raise


def event_of(*contents: Json) -> bytes:
    """Events in ASCII, since some clients also end lines at characters other than line feeds."""
    return "".join(f"data: {json.dumps(each, separators=(',', ':'))}\n\n" for each in contents).encode("ascii")


@contextmanager
def refusing() -> Iterator[None]:
    """The error that ended a job, as the answer to its request."""
    try:
        yield
    except Ended as error:
        raise RefusedRequest(str(error), HTTPStatus.SERVICE_UNAVAILABLE, RETRY_LATER) from error
    except RunError as error:
        raise RefusedRequest(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
    except UserError as error:
        raise RefusedRequest(str(error)) from error


def served_engine(policy: Policy, max_rows: int) -> InProcessEngine:
    longest = min(policy.max_positions, 2 * USUAL_TOKENS)  # a usual prompt, and an answer
    return engine_in_parity(policy, max_rows=max_rows, longest=longest)


def continuations_of(asked: CompletionRequest, policy: Policy) -> tuple[SamplingRequest, list[Continuation]]:
    """What a request samples: each prompt is a draw."""
    settings = SamplingRequest(
        sampling=asked.options.sampling,
        key=StreamKey(asked.seed, "serve", 0),
        stop_texts=asked.stops,
        keep_alternatives=min(asked.logprobs or 0, policy.num_logits),
    )
    return settings, [
        Continuation(
            prefix=prompt.tokens,
            draw=draw,
            sample=sample,
            limit=min(asked.options.max_completion_tokens, policy.max_positions - len(prompt.tokens)),
            name=f"prompt {prompt.id}",
        )
        for draw, prompt in enumerate(asked.prompts)
        for sample in range(asked.count)
    ]
