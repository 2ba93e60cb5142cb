"""A page on this machine on which people vote.

It listens to 127.0.0.1 only.  The page itself holds nothing of anybody's; each rater's address ends in a token behind
`#`, which browsers keep to themselves, and every question and vote has to bring it in a header of our own.  A page of
another site cannot send such a header without asking first, which is refused.  Texts are shown with their control
characters written out, and the page puts them in as text, never as HTML.
"""

import base64
import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from posttrain.commands.collection.ballot import CHOICES, Ballot, StaleVote
from posttrain.commands.serving.http_base import Answer, LocalServer, RefusedRequest, RequestHandler, brings, own_hosts
from posttrain.errors import RunError, UserError
from posttrain.runs.progress import visible

TOKEN_HEADER = "X-Posttrain-Token"
LOOK_SECONDS = 0.2
"""Between two looks at whether voting is to stop."""
PAGE = Path(__file__).with_name("ballot_page.html").read_text(encoding="utf-8")


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
"""With every answer: the page loads nothing, is in no frame, and sends no referrer."""


class BallotServer(LocalServer):
    """Pages for raters, one ballot each."""

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
        base = f"http://127.0.0.1:{self.server_port}/"
        return {ballot.rater: f"{base}#{token}" for token, ballot in self.ballots.items()}

    def end(self, ballot: Ballot) -> None:
        self._gone.add(ballot.rater)
        if len(self._gone) == len(self.ballots):
            self.ended.set()

    def state(self, ballot: Ballot) -> dict[str, Any]:
        pair = ballot.current()
        shown = None
        if pair is not None:
            texts = {"question": pair.question, "left": pair.left, "right": pair.right}
            shown = {"id": pair.id, **{name: visible(text) for name, text in texts.items()}}
        return {"asks": visible(self.question), "rater": ballot.rater, "pair": shown, **ballot.progress()}


class BallotHandler(RequestHandler):
    """One connection."""

    max_body_bytes = 4096
    always_sent = HEADERS

    @property
    def pages(self) -> BallotServer:
        assert isinstance(self.server, BallotServer)
        return self.server

    def hosts(self) -> tuple[str, ...]:
        return own_hosts("127.0.0.1", self.pages.server_port)

    def get(self) -> Answer:
        self.require_own()
        if self.place not in ("/", "/state"):
            raise RefusedRequest(f"{self.place[:80]}: no such page", HTTPStatus.NOT_FOUND)
        return HTTPStatus.OK, PAGE if self.place == "/" else self.pages.state(self.ballot())

    def post(self) -> Answer:
        """A vote, an undo, or the end."""
        self.require_own()
        ballot, body = self.ballot(), self.body()
        try:
            if self.place == "/vote":
                choice, pair = body.get("choice"), body.get("pair")
                if not isinstance(pair, str) or choice not in CHOICES:
                    raise RefusedRequest(f"a vote has a pair and a choice of {', '.join(CHOICES)}")
                ballot.vote(pair, str(choice))
            elif self.place == "/undo":
                ballot.undo()
            elif self.place == "/end":
                self.pages.end(ballot)
            else:
                raise RefusedRequest(f"{self.place[:80]}: no such page", HTTPStatus.NOT_FOUND)
        except StaleVote:
            return HTTPStatus.CONFLICT, self.pages.state(ballot)
        except RunError as error:  # a disk that is full
            raise RefusedRequest(str(error), HTTPStatus.INSUFFICIENT_STORAGE) from error
        return HTTPStatus.OK, self.pages.state(ballot)

    def other(self) -> Answer:
        """Refuse; a browser that asks whether another site's page may vote gets no permission."""
        raise RefusedRequest(f"{self.command}: this page takes GET and POST", HTTPStatus.METHOD_NOT_ALLOWED)

    def ballot(self) -> Ballot:
        given = self.headers.get(TOKEN_HEADER, "")
        for token, ballot in self.pages.ballots.items():
            if brings(given, token):
                return ballot
        raise RefusedRequest("no rater's token: open the address that the terminal shows", HTTPStatus.FORBIDDEN)


def ask_on_pages(ballots: Sequence[Ballot], question: str, *, port: int, stopping: Callable[[], bool]) -> None:
    try:
        server = BallotServer(ballots, question, port=port)
    except OSError as error:
        raise UserError(f"--port {port}: cannot listen there ({error.strerror}).  Choose another port.") from error
    with server:
        answering = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        answering.start()
        for ballot in ballots:
            print(f"{ballot.rater}: {ballot.num_pairs - ballot.num_done} of {ballot.num_pairs} pairs to judge at")
            print(f"    {server.addresses[ballot.rater]}", flush=True)
        print("End with the button on the page or Ctrl-C: votes are kept, and --resume continues.", flush=True)
        while not server.ended.wait(LOOK_SECONDS) and not stopping():
            pass
        server.shutdown()
        answering.join()
