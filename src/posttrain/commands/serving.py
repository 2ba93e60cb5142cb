"""An OpenAI-compatible endpoint over the in-process engine: what a request asks for, and the answer to it."""

import json
import secrets
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.generation.options import SamplingOptions
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.models.loading import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Finish, Group, Prompt

MAX_BODY_BYTES = 8 << 20
MAX_COMPLETIONS = 128


class Refused(Exception):
    """A request that cannot be answered, with its status."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """A request, read and checked."""

    prompts: list[Prompt]
    count: int
    options: SamplingOptions
    seed: int
    stops: tuple[str, ...]


class Service:
    """A policy that answers requests, one at a time."""

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy, self.name = policy, name
        self.engine, self.renderer = Engine(policy), TokenizerRenderer(policy.tokenizer)
        self.lock = threading.Lock()

    def models(self) -> dict[str, Any]:
        """The one model that there is."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "posttrain"}]}

    def completions(self, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        """The answer to a request for completions."""
        asked = self.read(body, chat=chat)
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

    def read(self, body: dict[str, Any], *, chat: bool) -> Asked:
        """Check a request.  Raises Refused."""
        if body.get("stream"):
            raise Refused("stream: answers are given whole here; leave it out")
        if body.get("echo") or body.get("suffix"):
            raise Refused("echo and suffix are not known here; leave them out")
        contents = [body.get("messages")] if chat else listed(body.get("prompt"))
        if not contents or any(not content for content in contents):
            raise Refused("messages: a list of at least one is needed" if chat else "prompt: text is needed")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or (512 if chat else 16)
        count, seed = body.get("n") or 1, body.get("seed")
        try:
            prompts = [self.renderer.render(content, id=f"request {i}") for i, content in enumerate(contents)]
            options = SamplingOptions(
                max_completion_tokens=whole(limit, "max_tokens"),
                temperature=number(body.get("temperature", 1.0), "temperature"),
                top_p=number(body.get("top_p", 1.0), "top_p"),
                top_k=whole(body.get("top_k", 0), "top_k"),
                min_p=number(body.get("min_p", 0.0), "min_p"),
            )
        except UserError as error:
            raise Refused(str(error)) from error
        if not 1 <= whole(count, "n") <= MAX_COMPLETIONS:
            raise Refused(f"n = {count}: must be 1 to {MAX_COMPLETIONS}")
        drawn = secrets.randbelow(1 << 31) if seed is None else whole(seed, "seed")
        stops = tuple(stop for stop in listed(body.get("stop")) if isinstance(stop, str) and stop)
        return Asked(prompts=prompts, count=count, options=options, seed=drawn, stops=stops)

    def sampled(self, asked: Asked) -> list[Group]:
        """The completions; other requests wait."""
        request = Request(
            group_size=asked.count,
            max_completion_tokens=asked.options.max_completion_tokens,
            sampling=asked.options.sampling,
            key=StreamKey(asked.seed, "serve", 0),
        )
        with self.lock:
            try:
                return self.engine.rollout(asked.prompts, request)
            except UserError as error:
                raise Refused(str(error)) from error

    def choice(self, index: int, group: Group, sample: int, asked: Asked, *, chat: bool) -> dict[str, Any]:
        """One completion, cut at the first stop text."""
        rollout = group.rollouts[sample]
        cuts = [at for at in (rollout.text.find(stop) for stop in asked.stops) if at >= 0]
        text = rollout.text[: min(cuts)] if cuts else rollout.text
        reason = "stop" if cuts or rollout.finish is Finish.STOP else "length"
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {"index": index, **said, "finish_reason": reason, "logprobs": None}


def listed(value: object) -> list[Any]:
    """One or many as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def whole(value: object, name: str) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{name} = {value!r}: must be a whole number")
    return value


def number(value: object, name: str) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{name} = {value!r}: must be a number")
    return float(value)


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
            self.refuse(Refused(f"{self.path}: no such path", HTTPStatus.NOT_FOUND))

    def do_POST(self) -> None:
        """Completions."""
        paths = {"/v1/completions": False, "/v1/chat/completions": True}
        try:
            if self.path.rstrip("/") not in paths:
                raise Refused(f"{self.path}: no such path", HTTPStatus.NOT_FOUND)
            self.answer(HTTPStatus.OK, self.service.completions(self.body(), chat=paths[self.path.rstrip("/")]))
        except Refused as refusal:
            self.refuse(refusal)

    def body(self) -> dict[str, Any]:
        """The request's JSON object."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True  # what follows is no request
            raise Refused(f"Content-Length = {length!r}: must be given, and at most {MAX_BODY_BYTES}")
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise Refused("the body must be a JSON object")
        return found

    def refuse(self, refusal: Refused) -> None:
        """An error as OpenAI's clients read it."""
        self.answer(refusal.status, {"error": {"message": str(refusal), "type": "invalid_request_error"}})

    def answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: requests may hold what should not be in a terminal."""


class Server(ThreadingHTTPServer):
    """Threads for connections; the model answers one after the other."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        super().__init__(address, Handler)
        self.service = service


def serving(policy: Policy, *, name: str, host: str = "127.0.0.1", port: int = 0) -> Server:
    """A server that listens; `serve_forever` answers."""
    try:
        return Server((host, port), Service(policy, name))
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: cannot listen there ({error.strerror}); choose another port") from error
