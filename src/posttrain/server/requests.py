"""What all routes share: who may send requests, the body of a request, and answers or rejections.

A page of another site has its own name as `Origin`; a site whose name was made to point here (DNS rebinding) has its
name as `Host`.  Both are rejected, unless a token protects the server or the user opened it to others.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

BODY_BYTES = 8 << 20
"""Default limit of a request's body."""
READ_PAST_BYTES = 64 << 20
"""Largest rejected body that is still read to its end, so that the client can read the error."""
MOST_DIGITS = 9
"""Maximum number of digits of a length."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
RETRY_LATER: Mapping[str, str] = MappingProxyType({"Retry-After": "5"})
"""Seconds that OpenAI's clients wait before they retry."""

Endpoint = Callable[[Request], Awaitable[Response]]


class RefusedRequest(Exception):
    """A rejected request, with the status and further headers of the answer."""

    def __init__(
        self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers

    @property
    def content(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind}}

    @property
    def answer(self) -> Response:
        """Whether to close the connection, since an unread body must not be read as the next request."""
        return JSONResponse(self.content, status_code=self.status, headers={"Connection": "close", **self.headers})


def server_fault() -> RefusedRequest:
    return RefusedRequest("Internal error. See the server's terminal.", HTTPStatus.INTERNAL_SERVER_ERROR)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send requests."""

    hosts: Collection[str] | None
    """Names that a request may use for this machine; None: any."""
    token: str = ""
    """The required token; empty: none."""
    origins: Collection[str] = ()
    """Other sites whose pages may send requests too."""

    def checked(self, endpoint: Endpoint, *, needs_token: bool = True) -> Endpoint:
        """The endpoint, for those who may send requests."""

        async def answer(request: Request) -> Response:
            self.require_own(request)
            if needs_token:
                self.require_token(request)
            return await endpoint(request)

        return answer

    def require_own(self, request: Request) -> None:
        """Reject a request from another site's page, and one that names another host than this machine."""
        host, target = request.headers.get("Host", ""), request.scope.get("target_host")
        for named in (host,) if target is None else (host, target):
            if self.hosts is not None and named not in self.hosts:
                rule = f"Host = {named[:80]!r}: use {' or '.join(self.hosts)}"
                raise RefusedRequest(rule, HTTPStatus.FORBIDDEN)
        origin = request.headers.get("Origin")
        if origin is not None and origin not in (f"http://{host}", *self.origins):
            rule = "pages of this site may not send requests here"
            raise RefusedRequest(f"Origin = {origin[:80]!r}: {rule}", HTTPStatus.FORBIDDEN)

    def require_token(self, request: Request) -> None:
        scheme, _, brought = request.headers.get("Authorization", "").partition(" ")
        if self.token and not (scheme.lower() == "bearer" and has_token(brought.strip(), self.token)):
            needed = "Authorization: send the token that the server was started with, as `Bearer TOKEN` (api_key)"
            raise RefusedRequest(needed, HTTPStatus.UNAUTHORIZED)


async def json_body(request: Request, *, most_bytes: int = BODY_BYTES) -> bytes:
    """The request's body, which must be declared as JSON."""
    kind = request.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":  # another site's page may send any other
        rule = f"Content-Type = {brief(kind)}: must be application/json"
        raise RefusedRequest(rule, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    length = request.headers.get("Content-Length", "0")
    if len(length) > MOST_DIGITS:
        raise RefusedRequest(f"Content-Length = {length[:20]!r}: must be at most {most_bytes}")
    num_read, parts = 0, list[bytes]()
    if int(length) <= READ_PAST_BYTES:  # its client reads no answer before it has sent its body
        async for part in request.stream():
            num_read += len(part)
            if num_read <= most_bytes:
                parts.append(part)
            elif num_read > READ_PAST_BYTES:
                break
    if (size := max(num_read, int(length))) > most_bytes:
        rule = f"a body of {size} bytes: must have at most {most_bytes}"
        raise RefusedRequest(rule, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return b"".join(parts)


async def json_object(request: Request, *, most_bytes: int = BODY_BYTES) -> dict[str, Any]:
    """The request's JSON object; all of it must be valid Unicode."""
    body = await json_body(request, most_bytes=most_bytes)
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = "the body has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        raise RefusedRequest(half) from error
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RefusedRequest("the body must be a JSON object")
    return found


async def client_gone(request: Request) -> None:
    """Return when the client of a request whose body was read has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def while_client_waits(
    request: Request, answer: Awaitable[Any], seconds_left: Callable[[], float | None] = lambda: None
) -> Any:
    """The result of an awaitable; if the client leaves, it is cancelled and ClientDisconnect is raised.

    `seconds_left` may raise when the time is over; it is asked again after as many seconds as it returns.
    """
    making, gone = asyncio.ensure_future(answer), asyncio.ensure_future(client_gone(request))
    try:
        while not (making.done() or gone.done()):
            await asyncio.wait((making, gone), timeout=seconds_left(), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise ClientDisconnect
        return making.result()
    finally:
        for each in (making, gone):
            each.cancel()
        await asyncio.wait((making, gone))


def brief(value: object) -> str:
    """A value shortened for a message; lists and objects are named by their type, since they may be deep."""
    if value is None or isinstance(value, str | int | float):
        return "null" if value is None else repr(value[:80] if isinstance(value, str) else value)[:90]
    return f"a {type(value).__name__}"


def has_token(given: str, token: str) -> bool:
    """Whether a given token is the right one; compared in constant time."""
    return secrets.compare_digest(given.encode("latin-1", "replace"), token.encode())
