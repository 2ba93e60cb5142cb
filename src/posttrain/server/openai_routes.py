"""An OpenAI-compatible endpoint over HTTP: one model, which answers a request at a time while its client waits."""

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.commands.serving import http_base
from posttrain.commands.serving.http_base import Answer, RefusedRequest
from posttrain.commands.serving.http_requests import CompletionRequest, read_completion_request
from posttrain.errors import RunError, UserError
from posttrain.generation.engine import sample_groups
from posttrain.generation.parity import USUAL_TOKENS, engine_in_parity
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Group, Rollout

MAX_ROWS = 256
"""Completions that are decoded side by side."""
LOOK_SECONDS = 0.2
"""Between two looks at whether the client of a request is still there."""
PATIENCE_SECONDS = 30.0
"""How far a request may exceed its time limit before it counts as hanging: a step of the model takes its time."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of an incomplete character are decoded to."""
COMPLETIONS = {"/v1/completions": False, "/v1/chat/completions": True}
"""The paths of completions, and whether they are of a chat."""
ClientLeftTest = Callable[[], bool]


class ClientLeft(ConnectionError):
    """The client has closed the connection: the answer would not be read."""


class Service:
    """A policy that answers requests, one at a time."""

    def __init__(self, policy: Policy, renderer: TokenizerRenderer, *, name: str, seconds: float) -> None:
        longest = min(policy.max_positions, 2 * USUAL_TOKENS)  # a usual prompt, and an answer
        self.engine = engine_in_parity(policy, max_rows=MAX_ROWS, longest=longest)
        self.policy, self.renderer, self.name, self.seconds = self.engine.policy, renderer, name, seconds
        self.lock, self.began = threading.Lock(), int(time.time())
        self.reading = threading.Lock()
        """Held while a request is tokenised, which takes memory: one request at a time."""
        self.turn: tuple[float, float] | None = None
        """When the request that is answered began, and when the engine was last seen to sample for it."""
        self.waiting: set[int] = set()
        """Threads whose request waits for its turn."""
        self.stopped = threading.Event()

    def stop(self) -> None:
        """End all requests, and wait for the one in progress: a thread inside torch would abort the process."""
        self.stopped.set()
        for held in (self.reading, self.lock):
            if held.acquire(timeout=PATIENCE_SECONDS):
                held.release()

    def model(self, name: object) -> dict[str, Any]:
        """The model by its name.  Raises RefusedRequest for any other."""
        if name != self.name:
            only = f"model = {http_base.brief(name)}: `{self.name}` is the one model here; name it"
            raise RefusedRequest(only, HTTPStatus.NOT_FOUND)
        return {"id": self.name, "object": "model", "created": self.began, "owned_by": "posttrain"}

    def health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """The state of the engine.  A request that exceeds its time ends at the next look: if it does not, it hangs."""
        turn, now = self.turn, time.monotonic()
        if turn is None:
            return HTTPStatus.OK, {"status": "ok", "engine": "idle", "waiting": len(self.waiting)}
        seconds, since_token = (round(now - moment, 3) for moment in turn)
        hangs = now - turn[0] > self.seconds + PATIENCE_SECONDS
        said = {"status": "hangs" if hangs else "ok", "engine": "sampling", "waiting": len(self.waiting)}
        times = {"seconds": seconds, "seconds_since_token": since_token}
        return HTTPStatus.SERVICE_UNAVAILABLE if hangs else HTTPStatus.OK, {**said, **times}

    def completions(self, body: dict[str, Any], *, chat: bool, client_left: ClientLeftTest) -> dict[str, Any]:
        """The answer to a request for completions.  Raises ClientLeft."""
        if body.get("model") is not None:
            self.model(body["model"])
        with self.reading:
            self.require_reader(client_left)
            asked = read_completion_request(body, self.policy, self.renderer, chat=chat)
        rollouts = [rollout for group in self.sampled(asked, client_left) for rollout in group.rollouts]
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

    def sampled(self, asked: CompletionRequest, client_left: ClientLeftTest) -> list[Group]:
        """The completions, sampled when it is this request's turn."""
        request = GroupRequest(
            group_size=asked.count,
            max_completion_tokens=asked.options.max_completion_tokens,
            sampling=asked.options.sampling,
            key=StreamKey(asked.seed, "serve", 0),
            stop_texts=asked.stops,
        )
        self.wait_for_turn(client_left)
        began = time.monotonic()
        self.turn = began, began

        def look(_: int) -> None:
            self.turn = began, (now := time.monotonic())
            self.require_reader(client_left)
            if now > began + self.seconds:
                long = f"not done in {self.seconds:g} seconds; ask for fewer or shorter completions"
                raise RefusedRequest(long, HTTPStatus.SERVICE_UNAVAILABLE)

        try:
            return sample_groups(self.engine, asked.prompts, request, advance=look, look_seconds=LOOK_SECONDS)
        except RunError as error:
            raise RefusedRequest(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
        except UserError as error:
            raise RefusedRequest(str(error)) from error
        finally:
            self.turn = None
            self.lock.release()

    def wait_for_turn(self, client_left: ClientLeftTest) -> None:
        until = time.monotonic() + self.seconds
        self.waiting.add(threading.get_ident())
        try:
            while not self.lock.acquire(timeout=min(LOOK_SECONDS, self.seconds)):
                self.require_reader(client_left)
                if time.monotonic() > until:
                    busy = f"busy for {self.seconds:g} seconds with requests before this one; try again later"
                    raise RefusedRequest(busy, HTTPStatus.SERVICE_UNAVAILABLE)
        finally:
            self.waiting.discard(threading.get_ident())

    def require_reader(self, client_left: ClientLeftTest) -> None:
        if client_left():
            raise ClientLeft
        if self.stopped.is_set():
            raise RefusedRequest("the server ends; try again later", HTTPStatus.SERVICE_UNAVAILABLE)

    def choice(self, rollout: Rollout, asked: CompletionRequest, *, chat: bool) -> dict[str, Any]:
        cuts = [at for at in (rollout.text.find(stop) for stop in asked.stops) if at >= 0]
        text = rollout.text[: min(cuts)] if cuts else rollout.text
        reason = "length" if rollout.finish.cut_off and not cuts else "stop"
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        logprobs = openai_logprobs(rollout, len(text), self.policy.tokenizer, chat=chat) if asked.logprobs else None
        return {**said, "finish_reason": reason, "logprobs": logprobs}


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


class Handler(http_base.RequestHandler):
    """One connection."""

    ask_at, ask_after = 0.0, 1.0
    """When a client that has ended its sending is asked again whether it reads, and how many seconds after that."""

    server: "HttpServer"

    def answer(self) -> Answer:
        """The answer of the path, if it is there, takes this method and the token is right."""
        self.require_own()
        place, service, models = self.place.rstrip("/"), self.server.service, "/v1/models"
        if place not in (*COMPLETIONS, "/health", models) and not place.startswith(f"{models}/"):
            raise RefusedRequest(f"{place}: no such path", HTTPStatus.NOT_FOUND)
        allowed = "POST" if place in COMPLETIONS else "GET"
        if self.command != allowed:
            wrong = f"{self.command} {place}: this path takes {allowed}"
            raise RefusedRequest(wrong, HTTPStatus.METHOD_NOT_ALLOWED, allowed=allowed)
        if place == "/health":
            return service.health()
        scheme, _, brought = self.headers.get("Authorization", "").partition(" ")
        token = self.server.token
        if token and not (scheme.lower() == "bearer" and http_base.brings(brought.strip(), token)):
            needed = "Authorization: send the token that the server was started with, as `Bearer TOKEN` (api_key)"
            raise RefusedRequest(needed, HTTPStatus.UNAUTHORIZED)
        if place in COMPLETIONS:
            content = service.completions(self.body(), chat=COMPLETIONS[place], client_left=self.client_left)
        elif place == models:
            content = {"object": "list", "data": [service.model(service.name)]}
        else:
            content = service.model(place.removeprefix(f"{models}/"))
        return HTTPStatus.OK, content

    def client_left(self) -> bool:
        """Whether the client has gone.  What it has sent already is its next request.

        A client that has ended only its sending looks like one that left, until something is sent to it: one that left
        rejects that.  `100 Continue` may come before any answer, though not with HTTP/1.0, where such a client counts
        as gone.  It is sent again after 1, 2, 4, … seconds: some clients accept few of them.
        """
        poll = select.poll()  # which knows descriptors above 1,023 too
        poll.register(self.connection, select.POLLIN)
        happened = poll.poll(0)
        if not happened or happened[0][1] & (select.POLLHUP | select.POLLERR):
            return bool(happened)
        now = time.monotonic()
        if now < self.ask_at or self.connection.recv(1, socket.MSG_PEEK):
            return False
        if self.request_version != "HTTP/1.1":
            return True
        self.ask_at, self.ask_after = now + self.ask_after, 2 * self.ask_after
        self.send_response_only(HTTPStatus.CONTINUE)
        self.end_headers()
        return False


class HttpServer(http_base.LocalServer):
    """Threads for connections; the model answers one after the other."""

    def __init__(self, address: tuple[str, int], service: Service, token: str) -> None:
        self.service, self.token = service, token  # first, since a port that is taken closes the server
        super().__init__(address, Handler)
        protected = bool(token) or not http_base.is_loopback(address[0])
        self.hosts = None if protected else http_base.own_hosts(address[0], self.server_port)

    def server_close(self) -> None:
        super().server_close()
        self.service.stop()


def listening(service: Service, *, host: str = "127.0.0.1", port: int = 0, token: str = "") -> HttpServer:
    """A server that listens; `serve_forever` answers."""
    try:
        return HttpServer((host, port), service, token)
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: cannot listen there ({error.strerror}).  Choose another port.") from error
