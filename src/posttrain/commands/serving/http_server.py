"""An OpenAI-compatible endpoint over the in-process engine: one request after the other, each within a time."""

import json
import re
import secrets
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.commands.serving.http_requests import BadRequest, CompletionRequest, json_object, read_completion_request
from posttrain.errors import RunError, UserError
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Finish, Group

MAX_BODY_BYTES = 8 << 20
SECONDS = 600.0
"""Longest that a request may take, and that one waits for its turn."""


class Service:
    """A policy that answers requests, one at a time."""

    def __init__(self, policy: Policy, name: str, seconds: float) -> None:
        self.policy, self.name, self.seconds = policy, name, seconds
        self.engine, self.renderer = InProcessEngine(policy), TokenizerRenderer(policy.tokenizer)
        self.lock = threading.Lock()

    def models(self) -> dict[str, Any]:
        """The one model that there is."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "posttrain"}]}

    def completions(self, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        """The answer to a request for completions."""
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
        return {"index": index, **said, "finish_reason": reason, "logprobs": None}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server_version = "posttrain"
    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def service(self) -> Service:
        server: Any = self.server
        return server.service  # type: ignore[no-any-return]

    def do_GET(self) -> None:
        """The list of models, or a sign of life."""
        if self.path.rstrip("/") == "/v1/models":
            self.answer(HTTPStatus.OK, self.service.models())
        elif self.path.rstrip("/") == "/health":
            self.answer(HTTPStatus.OK, {"status": "ok"})
        else:
            self.refuse(BadRequest(f"{self.path}: no such path", HTTPStatus.NOT_FOUND))

    def do_POST(self) -> None:
        """Completions."""
        paths = {"/v1/completions": False, "/v1/chat/completions": True}
        try:
            if self.path.rstrip("/") not in paths:
                self.close_connection = True  # the body is not read, and is no next request
                raise BadRequest(f"{self.path}: no such path", HTTPStatus.NOT_FOUND)
            found = self.service.completions(self.body(), chat=paths[self.path.rstrip("/")])
        except BadRequest as refusal:
            self.refuse(refusal)
        except (ConnectionError, TimeoutError):  # the client has gone
            raise
        except Exception:
            self.close_connection = True
            self.refuse(BadRequest("a fault of the server; its terminal says more", HTTPStatus.INTERNAL_SERVER_ERROR))
            raise
        else:
            self.answer(HTTPStatus.OK, found)

    def body(self) -> dict[str, Any]:
        """The request's JSON object."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows is no request
            raise BadRequest(f"Content-Length = {length[:20]!r}: must be given, and at most {MAX_BODY_BYTES}")
        return json_object(self.rfile.read(int(length)))

    def refuse(self, refusal: BadRequest) -> None:
        """An error as OpenAI's clients read it."""
        self.answer(refusal.status, {"error": {"message": str(refusal), "type": "invalid_request_error"}})

    def answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
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


def serving(
    policy: Policy, *, name: str, host: str = "127.0.0.1", port: int = 0, seconds: float = SECONDS
) -> HttpServer:
    """A server that listens; `serve_forever` answers."""
    try:
        return HttpServer((host, port), Service(policy, name, seconds))
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: cannot listen there ({error.strerror}); choose another port") from error
