"""An OpenAI-compatible endpoint over HTTP: who may ask, what is asked for, and the answer as JSON."""

import json
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from posttrain.commands.serving.completion_service import Service
from posttrain.commands.serving.http_requests import BadRequest, brief, json_object
from posttrain.commands.serving.request_origin import brings, foreign, is_loopback, own_hosts
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of

MAX_BODY_BYTES = 8 << 20
READ_PAST_BYTES = 64 << 20
"""Largest body that is read past, so that its client reads why it is refused."""
SECONDS = 600.0
"""Longest that a request may take, and that one waits for its turn."""
COMPLETIONS = {"/v1/completions": False, "/v1/chat/completions": True}
"""Where completions are asked for, and whether of a chat."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server_version = "posttrain"
    protocol_version = "HTTP/1.1"
    timeout = 60
    ask_at, ask_after = 0.0, 1.0
    """When a client that has ended its sending is asked again whether it reads, and how many seconds after that."""

    @property
    def service(self) -> Service:
        return self.endpoint.service

    @property
    def endpoint(self) -> "HttpServer":
        """The server, and what it asks of a request."""
        assert isinstance(self.server, HttpServer)
        return self.server

    @property
    def is_of_models(self) -> bool:
        """Whether the path is one of the models'."""
        return self.place == "/v1/models" or self.place.startswith("/v1/models/")

    @property
    def place(self) -> str:
        """The path that is asked for.  Raises BadRequest."""
        try:
            return unquote(urlsplit(self.path).path).rstrip("/")
        except ValueError as error:
            raise BadRequest(f"{brief(self.path)}: is not a target ({error})") from error

    def do_GET(self) -> None:
        """The list of models, one of them, or what the engine does."""
        self.answered(self.found)

    def do_POST(self) -> None:
        """Completions."""
        self.answered(self.completed)

    def do_other(self) -> None:
        """What no path takes."""
        self.answered(self.refused)

    do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_other

    def found(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """What a GET asks for.  Raises BadRequest."""
        self.require_own()
        if self.place == "/health":
            return self.service.health()
        if not self.is_of_models:
            raise self.not_taken()
        self.require_token()
        if self.place == "/v1/models":
            return HTTPStatus.OK, self.service.models()
        return HTTPStatus.OK, self.service.model(self.place.removeprefix("/v1/models/"))

    def completed(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """What a POST asks for.  Raises BadRequest, and ClientLeft."""
        self.require_own()
        if self.place not in COMPLETIONS:
            raise self.not_taken()
        self.require_token()
        chat = COMPLETIONS[self.place]
        return HTTPStatus.OK, self.service.completions(self.body(), chat=chat, client_left=self.client_left)

    def refused(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """What any other method asks for."""
        self.require_own()
        raise self.not_taken()

    def answered(self, make: Callable[[], tuple[HTTPStatus, dict[str, Any]]]) -> None:
        """Answer a request, or say why not."""
        try:
            status, content = make()
        except BadRequest as refusal:
            self.refuse(refusal)
        except (ConnectionError, TimeoutError):  # the client has gone
            raise
        except Exception:
            self.close_connection = True
            self.refuse(BadRequest("a fault of the server; its terminal says more", HTTPStatus.INTERNAL_SERVER_ERROR))
            raise
        else:
            self.answer(status, content, {})

    def require_own(self) -> None:
        """Refuse a request that another site's page made, or that has another host's name.  Raises BadRequest."""
        if len(self.headers.get_all("Host", [])) > 1:
            self.close_connection = True
            raise BadRequest("Host: is given more than once")
        if why := self.target_host() or foreign(self.headers, self.endpoint.hosts):
            self.close_connection = True  # the body is not read, and is no next request
            raise BadRequest(why, HTTPStatus.FORBIDDEN)

    def target_host(self) -> str:
        """Why a target names another host; empty where it does not.  Raises BadRequest."""
        try:
            target = urlsplit(self.path)
            named = target.netloc and f"{target.hostname}:{target.port or 80}"
        except ValueError as error:
            self.close_connection = True
            raise BadRequest(f"{brief(self.path)}: is not a target ({error})") from error
        hosts = self.endpoint.hosts
        if not named or hosts is None or target.netloc in hosts:
            return ""
        return f"{brief(self.path)}: is a target of another host; use {' or '.join(hosts)}"

    def require_token(self) -> None:
        """Refuse a request without the token, where there is one.  Raises BadRequest."""
        token = self.endpoint.token
        scheme, _, brought = self.headers.get("Authorization", "").partition(" ")
        if token and not (scheme.lower() == "bearer" and brings(brought.strip(), token)):
            self.close_connection = True
            needed = "Authorization: the token that the server was started with is needed, as `Bearer TOKEN` (api_key)"
            raise BadRequest(needed, HTTPStatus.UNAUTHORIZED)

    def client_left(self) -> bool:
        """Whether the client has gone.  What it has sent already is its next request.

        A client that has ended only its sending looks like one that left, until something is sent to it: one that left
        rejects that.  `100 Continue` may come before any answer, though not with HTTP/1.0, where such a client counts
        as gone.  It is sent again after 1, 2, 4, … seconds: some clients take few of them.
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

    def not_taken(self) -> BadRequest:
        """The refusal of a path that is not there, or takes another method."""
        self.close_connection = True  # the body is not read, and is no next request
        if self.place in COMPLETIONS:
            allowed = "POST"
        elif self.place == "/health" or self.is_of_models:
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
        """The request's JSON object.  Raises BadRequest."""
        kind = self.headers.get("Content-Type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            self.close_connection = True  # a page of another site may send any other type without asking
            rule = f"Content-Type = {brief(kind)}: must be application/json"
            raise BadRequest(rule, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length):
            self.close_connection = True  # what follows is no request
            raise BadRequest(f"Content-Length = {length[:20]!r}: must be given, and at most {MAX_BODY_BYTES}")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self.read_past(int(length))
            rule = f"Content-Length = {length}: must be at most {MAX_BODY_BYTES}"
            raise BadRequest(rule, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        return json_object(self.rfile.read(int(length)))

    def read_past(self, length: int) -> None:
        """Read what a client still sends, for it reads no answer before it is done; of far too much nothing."""
        left = length if length <= READ_PAST_BYTES else 0
        while left and (part := self.rfile.read(min(left, 1 << 16))):
            left -= len(part)

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

    def __init__(self, address: tuple[str, int], service: Service, token: str) -> None:
        self.service, self.token = service, token  # first, since a port that is taken closes the server
        super().__init__(address, Handler)
        protected = bool(token) or not is_loopback(address[0])
        self.hosts = None if protected else own_hosts(address[0], self.server_port)
        """What a request may call this machine; None is anything."""

    def server_close(self) -> None:
        """End the requests too."""
        super().server_close()
        self.service.stop()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what is our fault; a client that has gone is nobody's."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serving(policy: Policy, *, name: str, seconds: float = SECONDS, token: str = "") -> HttpServer:
    """A server of a policy that listens on a free port of this machine; `serve_forever` answers."""
    return listening(Service(policy, renderer_of(policy), name=name, seconds=seconds), token=token)


def listening(service: Service, *, host: str = "127.0.0.1", port: int = 0, token: str = "") -> HttpServer:
    """A server that listens; `serve_forever` answers."""
    try:
        return HttpServer((host, port), service, token)
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: cannot listen there ({error.strerror}); choose another port") from error
