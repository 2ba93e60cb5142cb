"""An OpenAI-compatible endpoint over the in-process engine: one request after the other, each within a time."""

import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from posttrain.commands.serving.http_requests import (
    BadRequest,
    CompletionRequest,
    brief,
    json_object,
    read_completion_request,
)
from posttrain.commands.serving.token_logprobs import token_logprobs
from posttrain.errors import RunError, UserError
from posttrain.generation.parity import USUAL_TOKENS, engine_in_parity
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Finish, Group

MAX_BODY_BYTES = 8 << 20
MAX_ROWS = 256
"""Completions that are decoded side by side."""
SECONDS = 600.0
"""Longest that a request may take, and that one waits for its turn."""
COMPLETIONS = {"/v1/completions": False, "/v1/chat/completions": True}
"""Where completions are asked for, and whether of a chat."""


class Service:
    """A policy that answers requests, one at a time."""

    def __init__(self, policy: Policy, renderer: TokenizerRenderer, *, name: str, seconds: float) -> None:
        longest = min(policy.max_positions, 2 * USUAL_TOKENS)  # a usual prompt, and an answer
        self.engine = engine_in_parity(policy, max_rows=MAX_ROWS, longest=longest)
        self.policy, self.renderer, self.name, self.seconds = self.engine.policy, renderer, name, seconds
        self.lock, self.began = threading.Lock(), int(time.time())

    def models(self) -> dict[str, Any]:
        """The one model that there is."""
        return {"object": "list", "data": [self.model(self.name)]}

    def model(self, name: object) -> dict[str, Any]:
        """The model by its name.  Raises BadRequest for any other."""
        if name != self.name:
            only = f"model = {brief(name)}: `{self.name}` is the one model here; name it"
            raise BadRequest(only, HTTPStatus.NOT_FOUND)
        return {"id": self.name, "object": "model", "created": self.began, "owned_by": "posttrain"}

    def completions(self, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        """The answer to a request for completions."""
        if body.get("model") is not None:
            self.model(body["model"])
        asked = read_completion_request(body, self.policy, self.renderer, chat=chat)
        groups = self.sampled(asked)
        choices = [
            self.choice(index, group, sample, asked, chat=chat)
            for index, (group, sample) in enumerate((group, s) for group in groups for s in range(asked.count))
        ]
        prompt_tokens = sum(len(prompt.tokens) for prompt in asked.prompts)
        completion_tokens = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def sampled(self, asked: CompletionRequest) -> list[Group]:
        """The completions; other requests wait, and neither they nor this one without end."""
        request = Request(
            group_size=asked.count,
            max_completion_tokens=asked.options.max_completion_tokens,
            sampling=asked.options.sampling,
            key=StreamKey(asked.seed, "serve", 0),
            stop_texts=asked.stops,
        )
        if not self.lock.acquire(timeout=self.seconds):
            busy = f"busy for {self.seconds:g} seconds with requests before this one; try again later"
            raise BadRequest(busy, HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            until = time.monotonic() + self.seconds
            return self.engine.rollout(asked.prompts, request, before_token=lambda: self.require_time(until))
        except RunError as error:
            raise BadRequest(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from error
        except UserError as error:
            raise BadRequest(str(error)) from error
        finally:
            self.lock.release()

    def require_time(self, until: float) -> None:
        """End a request that has taken too long."""
        if time.monotonic() > until:
            long = f"not done in {self.seconds:g} seconds; ask for fewer or shorter completions"
            raise BadRequest(long, HTTPStatus.SERVICE_UNAVAILABLE)

    def choice(self, index: int, group: Group, sample: int, asked: CompletionRequest, *, chat: bool) -> dict[str, Any]:
        """One completion, cut at the first stop text."""
        rollout = group.rollouts[sample]
        cuts = [at for at in (rollout.text.find(stop) for stop in asked.stops) if at >= 0]
        text = rollout.text[: min(cuts)] if cuts else rollout.text
        reason = "stop" if cuts or rollout.finish is Finish.STOP else "length"
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        logprobs = token_logprobs(rollout, len(text), self.policy.tokenizer, chat=chat) if asked.logprobs else None
        return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server_version = "posttrain"
    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def service(self) -> Service:
        server: Any = self.server
        return server.service  # type: ignore[no-any-return]

    @property
    def place(self) -> str:
        """The path that is asked for."""
        return unquote(urlsplit(self.path).path).rstrip("/")

    def do_GET(self) -> None:
        """The list of models, one of them, or a sign of life."""
        try:
            if self.place == "/v1/models":
                found = self.service.models()
            elif self.place.startswith("/v1/models/"):
                found = self.service.model(self.place.removeprefix("/v1/models/"))
            elif self.place == "/health":
                found = {"status": "ok"}
            else:
                raise self.not_taken()
        except BadRequest as refusal:
            self.refuse(refusal)
        else:
            self.answer(HTTPStatus.OK, found, {})

    def do_POST(self) -> None:
        """Completions."""
        try:
            if self.place not in COMPLETIONS:
                raise self.not_taken()
            found = self.service.completions(self.body(), chat=COMPLETIONS[self.place])
        except BadRequest as refusal:
            self.refuse(refusal)
        except (ConnectionError, TimeoutError):  # the client has gone
            raise
        except Exception:
            self.close_connection = True
            self.refuse(BadRequest("a fault of the server; its terminal says more", HTTPStatus.INTERNAL_SERVER_ERROR))
            raise
        else:
            self.answer(HTTPStatus.OK, found, {})

    def do_other(self) -> None:
        """What no path takes."""
        self.refuse(self.not_taken())

    do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_other

    def not_taken(self) -> BadRequest:
        """The refusal of a path that is not there, or takes another method."""
        self.close_connection = True  # the body is not read, and is no next request
        if self.place in COMPLETIONS:
            allowed = "POST"
        elif self.place in ("/health", "/v1/models") or self.place.startswith("/v1/models/"):
            allowed = "GET"
        else:
            return BadRequest(f"{self.place}: no such path", HTTPStatus.NOT_FOUND)
        wrong = f"{self.command} {self.place}: this path takes {allowed}"
        return BadRequest(wrong, HTTPStatus.METHOD_NOT_ALLOWED, allowed=allowed)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no HTTP that we know, answered as everything else is."""
        self.close_connection = True
        status = HTTPStatus(code)
        self.refuse(BadRequest(message or status.phrase, status))

    def body(self) -> dict[str, Any]:
        """The request's JSON object."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows is no request
            raise BadRequest(f"Content-Length = {length[:20]!r}: must be given, and at most {MAX_BODY_BYTES}")
        return json_object(self.rfile.read(int(length)))

    def refuse(self, refusal: BadRequest) -> None:
        """An error as OpenAI's clients read it."""
        content = {"error": {"message": str(refusal), "type": "invalid_request_error"}}
        self.answer(refusal.status, content, {"Allow": refusal.allowed} if refusal.allowed else {})

    def answer(self, status: HTTPStatus, content: dict[str, Any], headers: Mapping[str, str]) -> None:
        payload = json.dumps(content).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: requests may hold what should not be in a terminal."""


class HttpServer(ThreadingHTTPServer):
    """Threads for connections; the model answers one after the other."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        super().__init__(address, Handler)
        self.service = service

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what is our fault; a client that has gone is nobody's."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serving(policy: Policy, *, name: str, seconds: float = SECONDS) -> HttpServer:
    """A server of a policy that listens on a free port of this machine; `serve_forever` answers."""
    return listening(Service(policy, TokenizerRenderer(policy.tokenizer), name=name, seconds=seconds))


def listening(service: Service, *, host: str = "127.0.0.1", port: int = 0) -> HttpServer:
    """A server that listens; `serve_forever` answers."""
    try:
        return HttpServer((host, port), service)
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: cannot listen there ({error.strerror}); choose another port") from error
