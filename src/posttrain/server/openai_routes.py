"""OpenAI's routes: one model, which samples for all requests side by side."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from posttrain.errors import RunError, UserError
from posttrain.generation.engine import rollouts_of
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import USUAL_TOKENS, engine_in_parity
from posttrain.generation.request import Continuation, Request as SamplingRequest, Sampled, StreamKey
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Rollout
from posttrain.server import requests
from posttrain.server.application import route
from posttrain.server.openai_requests import CompletionRequest, read_completion_request
from posttrain.server.requests import Access, RefusedRequest
from posttrain.server.sampler import Ended, Sampler, SamplingJob

MAX_ROWS = 256
"""Completions that are decoded side by side."""
PATIENCE_SECONDS = 30.0
"""How far a request may exceed its time limit before it counts as hanging: a step of the model takes its time."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of an incomplete character are decoded to."""


class Service:
    """A policy that answers requests."""

    def __init__(
        self, policy: Policy, renderer: TokenizerRenderer, *, name: str, seconds: float, max_rows: int = MAX_ROWS
    ) -> None:
        self.sampler = Sampler(served_engine(policy, max_rows))
        self.policy, self.renderer, self.name, self.seconds = self.engine.policy, renderer, name, seconds
        self.began = int(time.time())
        self.reading = asyncio.Lock()
        """Held while a request is tokenised, which takes memory: one request at a time."""

    @property
    def engine(self) -> InProcessEngine:
        return self.sampler.engine

    def require_idle(self) -> None:
        if self.sampler.num_open:
            raise RefusedRequest("completions are under way: pause with mode=wait first", HTTPStatus.CONFLICT)

    def begin_anew(self, policy: Policy) -> None:
        """Sample from another policy, with nothing under way.  Raises RefusedRequest where something is."""
        self.require_idle()
        self.sampler.close_idle()
        self.sampler.engine = served_engine(policy, self.engine.max_rows)
        self.policy = self.engine.policy

    def routes(self, access: Access) -> list[Route]:
        """The routes, with a slash at the end or without."""
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
        """The model by its name.  Raises RefusedRequest for any other."""
        if name != self.name:
            only = f"model = {requests.brief(name)}: `{self.name}` is the one model here; name it"
            raise RefusedRequest(only, HTTPStatus.NOT_FOUND)
        return {"id": self.name, "object": "model", "created": self.began, "owned_by": "posttrain"}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model(self.name)]})

    async def named_model(self, request: Request) -> Response:
        return JSONResponse(self.model(request.path_params["name"].rstrip("/")))

    async def health(self, request: Request) -> Response:
        """The state of the engine.  A request that exceeds its time ends at the next look: if it does not, it hangs."""
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
        async with self.reading:
            asked = await run_in_threadpool(read_completion_request, body, self.policy, self.renderer, chat=chat)
        sampled = await self.sampled(request, self.sampler.submit(*continuations_of(asked, self.policy)))
        return JSONResponse(await run_in_threadpool(self.answer_of, asked, sampled, chat=chat))

    async def sampled(self, request: Request, job: SamplingJob) -> list[Sampled]:
        """The completions of a job, in its order.  A client that leaves ends it."""
        try:
            found: list[Sampled] = await requests.while_client_waits(request, self._in_time(job))
        except Ended as error:
            raise RefusedRequest(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error
        except RunError as error:
            raise RefusedRequest(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
        except UserError as error:
            raise RefusedRequest(str(error)) from error
        finally:
            self.sampler.cancel(job)
        return found

    async def _in_time(self, job: SamplingJob) -> list[Sampled]:
        result = asyncio.wrap_future(job.result)
        while True:
            since = job.asked_at if job.began_at is None else job.began_at
            left = since + self.seconds - time.monotonic()
            await asyncio.wait([result], timeout=max(left, 0.0))
            if result.done():
                return result.result()
            if left <= 0 and since == job.asked_at:
                busy = f"busy for {self.seconds:g} seconds with requests before this one; try again later"
                raise RefusedRequest(busy, HTTPStatus.SERVICE_UNAVAILABLE)
            if left <= 0:
                long = f"not done in {self.seconds:g} seconds; ask for fewer or shorter completions"
                raise RefusedRequest(long, HTTPStatus.SERVICE_UNAVAILABLE)

    def answer_of(self, asked: CompletionRequest, sampled: Sequence[Sampled], *, chat: bool) -> dict[str, Any]:
        rollouts = rollouts_of(self.engine, sampled)
        prompt_tokens = sum(len(prompt.tokens) for prompt in asked.prompts)
        completion_tokens = sum(rollout.num_sampled for rollout in rollouts)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [
                {"index": index, **self.choice(rollout, asked, chat=chat)} for index, rollout in enumerate(rollouts)
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def choice(self, rollout: Rollout, asked: CompletionRequest, *, chat: bool) -> dict[str, Any]:
        cuts = [at for at in (rollout.text.find(stop) for stop in asked.stops) if at >= 0]
        text = rollout.text[: min(cuts)] if cuts else rollout.text
        reason = "length" if rollout.finish.cut_off and not cuts else "stop"
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        logprobs = openai_logprobs(rollout, len(text), self.policy.tokenizer, chat=chat) if asked.logprobs else None
        return {**said, "finish_reason": reason, "logprobs": logprobs}


def served_engine(policy: Policy, max_rows: int) -> InProcessEngine:
    longest = min(policy.max_positions, 2 * USUAL_TOKENS)  # a usual prompt, and an answer
    return engine_in_parity(policy, max_rows=max_rows, longest=longest)


def continuations_of(asked: CompletionRequest, policy: Policy) -> tuple[SamplingRequest, list[Continuation]]:
    """What a request samples: each prompt is a draw."""
    settings = SamplingRequest(
        sampling=asked.options.sampling, key=StreamKey(asked.seed, "serve", 0), stop_texts=asked.stops
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


def openai_logprobs(rollout: Rollout, length: int, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> dict[str, Any]:
    """Tokens and log-probs of the first `length` characters of a completion; the stop token is not part of its text.

    They are log μ in nats at the temperature of the sampling (at 1 for temperature 0), before any cut.
    """
    texts = added_texts(tokenizer, rollout.sequence.text_tokens)
    offsets = list(accumulate(map(len, texts[:-1]), initial=0)) if texts else []
    shown = sum(offset < length for offset in offsets) if length < len(rollout.text) else len(texts)
    kept = list(zip(texts[:shown], rollout.logprobs[:shown], strict=True))
    if not chat:
        return {
            "tokens": [text for text, _ in kept],
            "token_logprobs": [logprob for _, logprob in kept],
            "top_logprobs": None,
            "text_offset": offsets[:shown],
        }
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8")), "top_logprobs": []}
        for text, logprob in kept
    ]
    return {"content": content, "refusal": None}


def added_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with its last.

    A few tokens are decoded at a time, since some tokenizers leave out a space before the first.
    """

    def decoded(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=False))

    texts: list[str] = []
    start = read = 0
    for end in range(1, len(tokens) + 1):
        before, now = decoded(tokens[start:read]), decoded(tokens[start:end])
        whole = len(now) > len(before) and not now.endswith(HALF_CHARACTER)
        texts.append(now[len(before) :] if whole or end == len(tokens) else "")
        if whole:
            start, read = read, end
    return texts
