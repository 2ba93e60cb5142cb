"""The voting page: people judge pairs of completions, each rater at a separate address.

Its server only listens on 127.0.0.1.  The page itself does not contain data; each rater's address ends in a token after
`#`, which browsers do not send.  Every request and vote must have it in our own header.  A page of another site cannot
send such a header without a preflight request, which is rejected.  Texts are shown with escaped control characters, and
the page inserts them as text, never as HTML.
"""

import base64
import hashlib
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from posttrain.errors import RunError
from posttrain.runs.progress import visible
from posttrain.server.addresses import own_hosts
from posttrain.server.application import application, route
from posttrain.server.listening import HttpServer, listening_socket
from posttrain.server.requests import Access, RefusedRequest, has_token, json_object
from posttrain.server.votes import CHOICES, StaleVote, Voter

TOKEN_HEADER = "X-Posttrain-Token"
BODY_BYTES = 4096
PAGE = Path(__file__).with_name("ballot_page.html").read_text(encoding="utf-8")


def digest_of_part(tag: str) -> str:
    """The digest of the page's only script or style in its content-security policy: nothing else runs or applies."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {digest_of_part('script')}; style-src"
    f" {digest_of_part('style')}; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer: the page cannot load anything, cannot be in a frame, and does not send a referrer."""

Act = Callable[[Voter, dict[str, Any]], None]


class VotingPage(HttpServer):
    """Pages for raters, one ballot each."""

    def __init__(self, ballots: Sequence[Voter], question: str, *, port: int = 0) -> None:
        bound = listening_socket("127.0.0.1", port, named=f"port {port}")
        self.question = question
        self.ballots = {secrets.token_urlsafe(24): ballot for ballot in ballots}
        """Ballots by the token of their rater."""
        self.ended = threading.Event()
        """Set when every rater has pressed the button to finish."""
        self._gone: set[str] = set()
        access = Access(own_hosts("127.0.0.1", bound.getsockname()[1]))
        routes = [
            route("GET", "/", access.checked(self.page)),
            route("GET", "/state", access.checked(self.state)),
            *(route("POST", path, access.checked(self.acting(act))) for path, act in self.acts.items()),
        ]
        super().__init__(application(routes), bound, headers=HEADERS)

    @property
    def addresses(self) -> dict[str, str]:
        base = f"http://127.0.0.1:{self.port}/"
        return {ballot.rater: f"{base}#{token}" for token, ballot in self.ballots.items()}

    @property
    def acts(self) -> dict[str, Act]:
        return {"/vote": vote, "/undo": undo, "/end": self.end}

    def end(self, ballot: Voter, _: dict[str, Any]) -> None:
        self._gone.add(ballot.rater)
        if len(self._gone) == len(self.ballots):
            self.ended.set()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def state(self, request: Request) -> Response:
        return JSONResponse(self.shown(self.ballot_of(request)))

    def acting(self, act: Act) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that votes, undoes a vote or finishes, and returns the next pair."""

        async def answer(request: Request) -> Response:
            ballot = self.ballot_of(request)
            body = await json_object(request, most_bytes=BODY_BYTES)
            status = HTTPStatus.OK
            try:
                await run_in_threadpool(act, ballot, body)
            except StaleVote:
                status = HTTPStatus.CONFLICT
            except RunError as error:  # a disk that is full
                raise RefusedRequest(str(error), HTTPStatus.INSUFFICIENT_STORAGE) from error
            return JSONResponse(self.shown(ballot), status)

        return answer

    def ballot_of(self, request: Request) -> Voter:
        given = request.headers.get(TOKEN_HEADER, "")
        ballot = next((ballot for token, ballot in self.ballots.items() if has_token(given, token)), None)
        if ballot is None:
            raise RefusedRequest(
                "the rater's token is missing.  Open the address that the terminal shows", HTTPStatus.FORBIDDEN
            )
        return ballot

    def shown(self, ballot: Voter) -> dict[str, Any]:
        pair = ballot.current()
        return {
            "asks": visible(self.question),
            "rater": ballot.rater,
            "pair": pair and {name: visible(text) for name, text in asdict(pair).items()},
            "done": len(ballot.votes),
            "total": len(ballot.pairs),
            "undo": bool(ballot.votes),
        }


def vote(ballot: Voter, body: dict[str, Any]) -> None:
    choice, pair = body.get("choice"), body.get("pair")
    if not isinstance(pair, str) or choice not in CHOICES:
        raise RefusedRequest(f"a vote must have a pair and a choice of {', '.join(CHOICES)}")
    ballot.vote(pair, str(choice))


def undo(ballot: Voter, _: dict[str, Any]) -> None:
    ballot.undo()
