"""The viewer's server: everybody on this machine gets the page and its modules; responses about runs need a token.

It listens on 127.0.0.1 and is read-only.  The address in the terminal ends in a token after `#`, which browsers do not
send.  Each request has the token in a header that pages of other sites cannot send.  The page does not load anything
from elsewhere, and content of runs is inserted as text.
"""

import json
import secrets
import threading
from http import HTTPStatus
from importlib import import_module
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from posttrain.server.addresses import own_hosts
from posttrain.server.application import application, route
from posttrain.server.listening import HttpServer, listening_socket
from posttrain.server.requests import Access, RefusedRequest, has_token
from posttrain.server.voting_page import TOKEN_HEADER
from posttrain.viewer.folder_files import Unreadable
from posttrain.viewer.row_selections import WrongQuery
from posttrain.viewer.viewer_responses import NoSuchResponse, OpenedRuns, ViewerResponse, viewer_response

PAGE = Path(__file__).with_name("viewer_page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
"""Files of the page that are served, by suffix."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""


class RunViewer(HttpServer):
    """The page, and responses about some runs."""

    def __init__(self, runs: OpenedRuns, *, port: int = 0) -> None:
        bound = listening_socket("127.0.0.1", port, named=f"port {port}")
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        self._one_at_a_time = threading.Lock()
        """Lock for the state between responses, which one thread at a time may change."""
        self.files = {
            path.relative_to(PAGE).as_posix(): path
            for path in PAGE.rglob("*")
            if path.suffix in TYPES and path.is_file()
        }
        """All files that `/page/NAME` serves: names are looked up here, never on disk."""
        access = Access(own_hosts("127.0.0.1", bound.getsockname()[1]))
        routes = [
            route("GET", "/", access.checked(self.index)),
            route("GET", "/page/{name:path}", access.checked(self.page_file)),
            route("GET", "/api/{path:path}", access.checked(self.api)),
        ]
        super().__init__(application(routes), bound, headers=HEADERS)
        # Loaded while the browser opens, and not in the first response.
        threading.Thread(target=import_module, args=("pyarrow.compute",), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    async def index(self, request: Request) -> Response:
        return file_response(self.files["index.html"])

    async def page_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.files:
            raise RefusedRequest(f"{name[:80]!r}: is not a file of the page", HTTPStatus.NOT_FOUND)
        return file_response(self.files[name])

    async def api(self, request: Request) -> Response:
        if not has_token(request.headers.get(TOKEN_HEADER, ""), self.token):
            raise RefusedRequest("no token: open the address that the terminal shows", HTTPStatus.FORBIDDEN)
        content = await run_in_threadpool(self._content, request.path_params["path"], dict(request.query_params))
        return Response(content, media_type="application/json")

    def _content(self, path: str, query: dict[str, str]) -> bytes:
        """The response as JSON in ASCII, so that halves of surrogate pairs survive."""
        found: ViewerResponse
        try:
            with self._one_at_a_time:
                found = viewer_response(self.runs, path, query)
        except NoSuchResponse as error:
            raise RefusedRequest(str(error), HTTPStatus.NOT_FOUND) from error
        except WrongQuery as error:
            raise RefusedRequest(str(error)) from error
        except Unreadable as fault:
            found = {"faults": [str(fault)]}
        return json.dumps(found, allow_nan=False, separators=(",", ":")).encode("ascii")


def file_response(path: Path) -> Response:
    return Response(path.read_bytes(), media_type=TYPES[path.suffix])
