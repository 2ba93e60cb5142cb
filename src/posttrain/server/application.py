"""One Starlette application: routes in, answers and rejections out, for every request."""

from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from http import HTTPMethod, HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from posttrain.server.requests import Endpoint, RefusedRequest, brief, server_fault

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


def with_cors(origins: Collection[str], app: Application) -> Application:
    """The application, which also answers the pages of other sites that are named, as browsers ask for them (CORS)."""
    if not origins:
        return app
    crossing = CORSMiddleware(
        app,
        allow_origins=[*origins],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )

    async def by_origin(scope: Scope, receive: Any, send: Any) -> None:
        named = scope["type"] == "http" and Headers(scope=scope).get("Origin") in origins
        await (crossing if named else app)(scope, receive, send)

    return by_origin


def route(method: str, path: str, endpoint: Endpoint) -> Route:
    """A route with a single method; Starlette would answer HEAD in addition to GET."""
    made = Route(path, endpoint, methods=[method])
    made.methods = {method}
    return made


def application(routes: Sequence[Route]) -> Application:
    """All routes, with rejections as JSON.  An internal error is a 500; its traceback goes to the server's terminal."""
    handlers: dict[Any, Callable[..., Response]] = {
        RefusedRequest: lambda request, refusal: refusal.answer,
        HTTPException: not_routed,
        ClientDisconnect: lambda request, error: Response(status_code=HTTPStatus.BAD_REQUEST),  # nobody reads it
        Exception: lambda request, error: server_fault().answer,
    }
    app = Starlette(routes=list(routes), exception_handlers=handlers)
    app.router.redirect_slashes = False

    async def at_its_path(scope: Scope, receive: Any, send: Any) -> None:
        refusal = None if scope["type"] == "lifespan" else target_fault(scope)
        await (app if refusal is None else refusal.answer)(scope, receive, send)

    return at_its_path


def not_routed(request: Request, error: HTTPException) -> Response:
    """The answer if no route has this path, or none has it with this method."""
    path = request.url.path
    allowed = (error.headers or {}).get("Allow", "")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} {path[:80]}: this path supports {allowed}"
        return RefusedRequest(message, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": allowed}).answer
    return RefusedRequest(f"{path[:80]}: no such path", HTTPStatus.NOT_FOUND).answer


def target_fault(scope: Scope) -> RefusedRequest | None:
    """Accept a full URL as the target, as clients of proxies send it; reject invalid targets and unknown methods."""
    if scope["method"] not in HTTPMethod.__members__:
        return RefusedRequest(f"{brief(scope['method'])}: no such method", HTTPStatus.NOT_IMPLEMENTED)
    target = scope["raw_path"].decode("ascii")
    if target.startswith("/"):
        return None
    try:
        parts = urlsplit(target)
        _ = parts.port
    except ValueError as error:
        return RefusedRequest(f"{brief(target)}: is not a valid target ({error})")
    scope["target_host"] = parts.netloc
    scope["path"], scope["raw_path"] = unquote(parts.path), parts.path.encode("ascii")
    return None
