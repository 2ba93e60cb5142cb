"""An OpenAI-compatible endpoint over HTTP: its paths, its token, and clients that leave."""

import select
import socket
import time
from http import HTTPStatus

from posttrain.commands.serving.completion_service import Service
from posttrain.commands.serving.http_base import (
    Answer,
    LocalServer,
    RefusedRequest,
    RequestHandler,
    brings,
    is_loopback,
    own_hosts,
)
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of

SECONDS = 600.0
"""Longest that a request may take, and that one waits for its turn."""
COMPLETIONS = {"/v1/completions": False, "/v1/chat/completions": True}
"""The paths of completions, and whether they are of a chat."""


class Handler(RequestHandler):
    """One connection."""

    ask_at, ask_after = 0.0, 1.0
    """When a client that has ended its sending is asked again whether it reads, and how many seconds after that."""

    @property
    def endpoint(self) -> "HttpServer":
        assert isinstance(self.server, HttpServer)
        return self.server

    def hosts(self) -> tuple[str, ...] | None:
        return self.endpoint.hosts

    def get(self) -> Answer:
        place, service = self.required_place("GET"), self.endpoint.service
        if place == "/health":
            return service.health()
        self.require_token()
        return HTTPStatus.OK, service.models() if place == "/v1/models" else service.model(place[len("/v1/models/") :])

    def post(self) -> Answer:
        chat = COMPLETIONS[self.required_place("POST")]
        self.require_token()
        return HTTPStatus.OK, self.endpoint.service.completions(self.body(), chat=chat, client_left=self.client_left)

    def other(self) -> Answer:
        return HTTPStatus.OK, self.required_place("no other method")

    def required_place(self, method: str) -> str:
        """The path, if it is there and takes this method.  Raises RefusedRequest."""
        self.require_own()
        place = self.place.rstrip("/")
        if place in COMPLETIONS:
            allowed = "POST"
        elif place in ("/health", "/v1/models") or place.startswith("/v1/models/"):
            allowed = "GET"
        else:
            raise RefusedRequest(f"{place}: no such path", HTTPStatus.NOT_FOUND)
        if method != allowed:
            wrong = f"{self.command} {place}: this path takes {allowed}"
            raise RefusedRequest(wrong, HTTPStatus.METHOD_NOT_ALLOWED, allowed=allowed)
        return place

    def require_token(self) -> None:
        token = self.endpoint.token
        scheme, _, brought = self.headers.get("Authorization", "").partition(" ")
        if token and not (scheme.lower() == "bearer" and brings(brought.strip(), token)):
            needed = "Authorization: send the token that the server was started with, as `Bearer TOKEN` (api_key)"
            raise RefusedRequest(needed, HTTPStatus.UNAUTHORIZED)

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


class HttpServer(LocalServer):
    """Threads for connections; the model answers one after the other."""

    def __init__(self, address: tuple[str, int], service: Service, token: str) -> None:
        self.service, self.token = service, token  # first, since a port that is taken closes the server
        super().__init__(address, Handler)
        protected = bool(token) or not is_loopback(address[0])
        self.hosts = None if protected else own_hosts(address[0], self.server_port)

    def server_close(self) -> None:
        super().server_close()
        self.service.stop()


def serving(policy: Policy, *, name: str, seconds: float = SECONDS, token: str = "") -> HttpServer:
    return listening(Service(policy, renderer_of(policy), name=name, seconds=seconds), token=token)


def listening(service: Service, *, host: str = "127.0.0.1", port: int = 0, token: str = "") -> HttpServer:
    """A server that listens; `serve_forever` answers."""
    try:
        return HttpServer((host, port), service, token)
    except OSError as error:
        where = f"--host {host} --port {port}"
        raise UserError(f"{where}: cannot listen there ({error.strerror}).  Choose another port.") from error
