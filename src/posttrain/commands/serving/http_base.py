"""What the servers of this package share: who may ask, the body as JSON, and the answer or why there is none.

A page of another site names itself as `Origin`; one whose name was made to point here (DNS rebinding) has that name as
`Host`.  Both are refused, unless a token protects the server or the user opened it to others.
"""

import ipaddress
import json
import re
import secrets
import sys
from collections.abc import Collection, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from annotated_types import Ge, Le

Port = Annotated[int, Ge(0), Le(65535)]
READ_PAST_BYTES = 64 << 20
"""Largest body that is read past, so that its client reads why it is refused."""


class RefusedRequest(Exception):
    """A request that is not answered, with its status and, where another method would do, that method."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, *, allowed: str = "") -> None:
        super().__init__(message)
        self.status, self.allowed = status, allowed


Answer = tuple[HTTPStatus, Any]
"""A status, and what is sent: a text is HTML, anything else JSON."""


class RequestHandler(BaseHTTPRequestHandler):
    """One connection, whose requests `answer` answers, whatever their `command`.  It may raise RefusedRequest."""

    server_version = "posttrain"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60
    max_body_bytes = 8 << 20
    always_sent: Mapping[str, str] = MappingProxyType({})
    """Headers of every answer."""
    server: "LocalServer"

    def answer(self) -> Answer:
        raise NotImplementedError

    def do_GET(self) -> None:
        try:
            self.send(*self.answer())
        except RefusedRequest as refusal:
            self.refuse(refusal)
        except (ConnectionError, TimeoutError):  # the client has gone
            raise
        except Exception:
            fault = "a fault of the server; its terminal says more"
            self.refuse(RefusedRequest(fault, HTTPStatus.INTERNAL_SERVER_ERROR))
            raise

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET

    @property
    def place(self) -> str:
        return unquote(urlsplit(self.path).path)

    def require_own(self) -> None:
        """Refuse a request of another site's page, and one that names another host than this machine."""
        hosts, named = self.server.hosts, self.headers.get_all("Host", [])
        if len(named) > 1:
            raise RefusedRequest("Host: is given more than once")
        try:
            target = urlsplit(self.path)
            if target.port is not None or target.netloc:
                named = [*named, target.netloc]
        except ValueError as error:
            raise RefusedRequest(f"{brief(self.path)}: is not a target ({error})") from error
        if foreign := [name for name in named or [""] if hosts is not None and name not in hosts]:
            raise RefusedRequest(f"Host = {foreign[0][:80]!r}: use {' or '.join(hosts or ())}", HTTPStatus.FORBIDDEN)
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers.get('Host', '')}":
            rule = "is a page of another site, which may not ask here"
            raise RefusedRequest(f"Origin = {origin[:80]!r}: {rule}", HTTPStatus.FORBIDDEN)

    def body(self) -> dict[str, Any]:
        """The request's JSON object, all of it proper Unicode."""
        kind = self.headers.get("Content-Type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":  # another site's page may send any other
            rule = f"Content-Type = {brief(kind)}: must be application/json"
            raise RefusedRequest(rule, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length):
            raise RefusedRequest(f"Content-Length = {length[:20]!r}: must be given, and at most {self.max_body_bytes}")
        if int(length) > self.max_body_bytes:
            left = int(length) if int(length) <= READ_PAST_BYTES else 0
            while left and (part := self.rfile.read(min(left, 1 << 16))):  # its client reads no answer before
                left -= len(part)
            rule = f"Content-Length = {length}: must be at most {self.max_body_bytes}"
            raise RefusedRequest(rule, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        try:
            found = json.loads(self.rfile.read(int(length)))
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = "the body has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
            raise RefusedRequest(half) from error
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise RefusedRequest("the body must be a JSON object")
        return found

    def refuse(self, refusal: RefusedRequest) -> None:
        self.close_connection = True  # a body that was not read is not the next request
        allowed = {"Allow": refusal.allowed} if refusal.allowed else {}
        self.send(refusal.status, {"error": {"message": str(refusal), "type": "invalid_request_error"}}, **allowed)

    def send(self, status: HTTPStatus, content: object, **headers: str) -> None:
        page = isinstance(content, str)
        payload = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8" if page else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for name, value in {**self.always_sent, **headers}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is not HTTP as everything else is answered."""
        status = HTTPStatus(code)
        self.refuse(RefusedRequest(message or status.phrase, status))

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: requests may hold what should not be in a terminal."""


class LocalServer(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    hosts: Collection[str] | None
    """What a request may call this machine; None is anything."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that left is not a fault
            super().handle_error(request, client_address)


def brief(value: object) -> str:
    """A value short enough for a message; a list or an object by its type, since it may be deep."""
    if value is None or isinstance(value, str | int | float):
        return "null" if value is None else repr(value[:80] if isinstance(value, str) else value)[:90]
    return f"a {type(value).__name__}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address: localhost, ::1 and all of 127.0.0.0/8."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_hosts(address: str, port: int) -> tuple[str, ...]:
    """What a request may call this machine, which listens on an address."""
    names = dict.fromkeys(["127.0.0.1", "localhost", "[::1]", f"[{address}]" if ":" in address else address])
    return (*(f"{name}:{port}" for name in names), *(names if port == 80 else ()))


def brings(given: str, token: str) -> bool:
    """Whether a request brings the token; compared in constant time."""
    return secrets.compare_digest(given.encode("latin-1", "replace"), token.encode())
