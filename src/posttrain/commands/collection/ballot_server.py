"""A page on this machine on which people vote: the standard library's server, and what it refuses.

It listens to 127.0.0.1 alone.  The page itself holds nothing of anybody's; each rater's address ends in a token behind
`#`, which browsers keep to themselves, and every question and vote has to bring it in a header of our own.  A page of
another site can send no such header without asking first, which is refused; a request that names another host than
this machine (a name that was made to point here) or another origin is refused too.  What is shown is text with its
control characters written out, which the page puts in as text and never as HTML.
"""

import base64
import hashlib
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.commands.collection.ballot import CHOICES, Ballot, StaleVote
from posttrain.commands.serving.request_origin import brings, foreign, own_hosts
from posttrain.errors import RunError, UserError
from posttrain.runs.progress import visible

TOKEN_HEADER = "X-Posttrain-Token"
MAX_BODY_BYTES = 4096
LOOK_SECONDS = 0.2
"""Between two looks at whether voting is to stop."""
PAGE = Path(__file__).with_name("ballot_page.html").read_text(encoding="utf-8")


class Refused(Exception):
    """A request that is not answered, with its status."""

    def __init__(self, message: str, status: HTTPStatus) -> None:
        super().__init__(message)
        self.status = status


class BallotServer(ThreadingHTTPServer):
    """Pages for raters, one ballot each."""

    daemon_threads = True

    def __init__(self, ballots: Sequence[Ballot], question: str, *, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), BallotHandler)
        self.question = question
        self.ballots = {secrets.token_urlsafe(24): ballot for ballot in ballots}
        """By the token of their rater."""
        self.ended = threading.Event()
        """Set when every rater has pressed the button that ends it."""
        self._gone: set[str] = set()

    @property
    def addresses(self) -> dict[str, str]:
        """Each rater's page."""
        base = f"http://127.0.0.1:{self.server_port}/"
        return {ballot.rater: f"{base}#{token}" for token, ballot in self.ballots.items()}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of what is our fault; a browser that has gone is nobody's."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def end(self, ballot: Ballot) -> None:
        """Note that a rater wants no further pair."""
        self._gone.add(ballot.rater)
        if len(self._gone) == len(self.ballots):
            self.ended.set()

    def state(self, ballot: Ballot) -> dict[str, Any]:
        """What the page shows."""
        pair = ballot.current()
        shown = None
        if pair is not None:
            texts = {"question": pair.question, "left": pair.left, "right": pair.right}
            shown = {"id": pair.id, **{name: visible(text) for name, text in texts.items()}}
        return {"asks": visible(self.question), "rater": ballot.rater, "pair": shown, **ballot.progress()}


class BallotHandler(BaseHTTPRequestHandler):
    """One connection."""

    server_version = "posttrain"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def pages(self) -> BallotServer:
        """The server, with its ballots."""
        assert isinstance(self.server, BallotServer)
        return self.server

    def do_GET(self) -> None:
        """The page, or what it shows now."""
        self._answered(self._found)

    def do_POST(self) -> None:
        """A vote, an undo, or the end."""
        self._answered(self._taken)

    def do_other(self) -> None:
        """What no path takes; a browser that asks whether another site's page may vote is told no."""
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", b"")

    do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_other

    def _found(self) -> object:
        self._require_own_host()
        path = urlsplit(self.path).path
        if path == "/":
            return PAGE
        if path == "/state":
            return self.pages.state(self._ballot())
        raise Refused(f"{path[:80]}: no such page", HTTPStatus.NOT_FOUND)

    def _taken(self) -> object:
        self._require_own_host()
        ballot, path, body = self._ballot(), urlsplit(self.path).path, self._body()
        if path == "/vote":
            choice, pair = body.get("choice"), body.get("pair")
            if not isinstance(pair, str) or choice not in CHOICES:
                raise Refused(f"a vote has a pair and a choice of {', '.join(CHOICES)}", HTTPStatus.BAD_REQUEST)
            ballot.vote(pair, str(choice))
        elif path == "/undo":
            ballot.undo()
        elif path == "/end":
            self.pages.end(ballot)
        else:
            raise Refused(f"{path[:80]}: no such page", HTTPStatus.NOT_FOUND)
        return self.pages.state(ballot)

    def _require_own_host(self) -> None:
        """Refuse a request that was made by another site's page, or by a name that was made to point here."""
        if why := foreign(self.headers, own_hosts("127.0.0.1", self.pages.server_port)):
            raise Refused(why, HTTPStatus.FORBIDDEN)

    def _ballot(self) -> Ballot:
        """The ballot of the rater whose token a request brings."""
        given = self.headers.get(TOKEN_HEADER, "")
        for token, ballot in self.pages.ballots.items():
            if brings(given, token):
                return ballot
        raise Refused("no rater's token: open the address that the terminal shows", HTTPStatus.FORBIDDEN)

    def _body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and int(length[:9]) <= MAX_BODY_BYTES and len(length) <= 9):
            raise Refused(f"a body of at most {MAX_BODY_BYTES} bytes is needed", HTTPStatus.BAD_REQUEST)
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused("the body is not JSON", HTTPStatus.BAD_REQUEST) from error
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object", HTTPStatus.BAD_REQUEST)
        return body

    def _answered(self, make: Callable[[], object]) -> None:
        """Send what a request is answered with, or why it is not."""
        status, content_type = HTTPStatus.OK, "application/json"
        try:
            answer = make()
        except Refused as refusal:
            self.close_connection = True  # a body that was not read is no next request
            status, answer = refusal.status, {"error": str(refusal)}
        except StaleVote:
            status, answer = HTTPStatus.CONFLICT, self.pages.state(self._ballot())
        except RunError as error:  # a disk that is full
            status, answer = HTTPStatus.INSUFFICIENT_STORAGE, {"error": str(error)}
        if isinstance(answer, str):
            content_type, payload = "text/html; charset=utf-8", answer.encode()
        else:
            payload = json.dumps(answer).encode()
        self._send(status, content_type, payload)

    def _send(self, status: HTTPStatus, content_type: str, payload: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(payload)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the terminal shows the addresses."""


def digest_of_part(tag: str) -> str:
    """How a content security policy names the page's one script or style: nothing else is run or applied."""
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
"""With every answer: the page loads nothing, is in no frame, and tells no other page where it is."""


def ask_on_pages(ballots: Sequence[Ballot], question: str, *, port: int, stopping: Callable[[], bool]) -> None:
    """Show each rater a page until one of them ends the voting, or it is stopped."""
    try:
        server = BallotServer(ballots, question, port=port)
    except OSError as error:
        raise UserError(f"--port {port}: cannot listen there ({error.strerror}); choose another port") from error
    with server:
        answering = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        answering.start()
        for ballot in ballots:
            print(f"{ballot.rater}: {ballot.num_pairs - ballot.num_done} of {ballot.num_pairs} pairs to judge at")
            print(f"    {server.addresses[ballot.rater]}", flush=True)
        print("End by the button on the page or by Ctrl-C: votes are kept, and --resume goes on.", flush=True)
        while not server.ended.wait(LOOK_SECONDS) and not stopping():
            pass
        server.shutdown()
        answering.join()
