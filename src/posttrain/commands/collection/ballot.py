"""A person's way through the pairs: which is asked next, which side each completion is on, votes and undo.

A terminal and a page on this machine show the same ballot.  Every vote is on the disk before the next pair is shown,
so that nothing is asked twice.

The page's server listens to 127.0.0.1 only.  The page itself holds nothing of anybody's; each rater's address ends in a
token behind `#`, which browsers keep to themselves, and every question and vote has to bring it in a header of our own.
A page of another site cannot send such a header without asking first, which is refused.  Texts are shown with their
control characters written out, and the page puts them in as text, never as HTML.
"""

import base64
import hashlib
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from posttrain.commands.collection.pairs import Pair, lot, standing_votes
from posttrain.commands.serving.http_base import Answer, LocalServer, RefusedRequest, RequestHandler, brings, own_hosts
from posttrain.errors import RunError, UserError
from posttrain.runs.files import LineJournal
from posttrain.runs.progress import visible

CHOICES = ("left", "right", "tie", "skip")


class StaleVote(Exception):
    """A vote on a pair that is not the current one: another window has voted, or a button was pressed twice."""


@dataclass(frozen=True, slots=True)
class ShownPair:
    """A pair as a person sees it; `question` is the prompt."""

    id: str
    question: str
    left: str
    right: str


class Ballot:
    """One rater's votes on a list of pairs."""

    def __init__(self, pairs: Sequence[Pair], journal: LineJournal, *, rater: str, seed: int) -> None:
        if not rater.strip() or not rater.isprintable():
            raise UserError(f"rater {rater!r}: use letters only, for example `anna`.")
        self.pairs, self.journal, self.rater, self.seed = {pair.id: pair for pair in pairs}, journal, rater, seed
        self._lock = threading.Lock()
        standing = standing_votes(journal.records()).get(rater, {})
        self.votes = {pair: vote for pair, vote in standing.items() if pair in self.pairs}
        """By pair: first, second, tie or skip."""

    def current(self) -> ShownPair | None:
        """The pair to be judged now; None if all are."""
        with self._lock:
            pair = self._current()
        if pair is None:
            return None
        texts = pair.first.text, pair.second.text
        left, right = texts if self._left(pair) == "first" else texts[::-1]
        return ShownPair(id=pair.id, question=pair.prompt.question, left=left, right=right)

    def vote(self, pair_id: str, choice: str) -> None:
        """Save a vote on the current pair.  Raises StaleVote for any other pair."""
        assert choice in CHOICES, choice
        with self._lock:
            pair = self._current()
            if pair is None or pair.id != pair_id:
                raise StaleVote(pair_id)
            left = self._left(pair)
            right = "second" if left == "first" else "first"
            vote = {"left": left, "right": right}.get(choice, choice)
            self.journal.append([{"rater": self.rater, "pair": pair.id, "vote": vote, "left": left}])
            self.votes[pair.id] = vote

    def undo(self) -> bool:
        """Take the last vote back, so that its pair is asked about again; whether there was one."""
        with self._lock:
            if not self.votes:
                return False
            last = next(reversed(self.votes))
            self.journal.append([{"rater": self.rater, "undone": last}])
            del self.votes[last]
            return True

    def _current(self) -> Pair | None:
        return next((pair for pair in self.pairs.values() if pair.id not in self.votes), None)

    def _left(self, pair: Pair) -> str:
        """Which of the pair is on the left: random for each rater."""
        return "first" if lot(self.seed, f"side for {self.rater}", pair.id) % 2 else "second"


KEYS = {"1": "left", "2": "right", "t": "tie", "s": "skip"}
HELP = "1 A is better   2 B is better   t tie   s skip   u undo   q end"
AT_THE_END = "Every pair is judged.  u takes the last vote back; anything else ends."


def ask_in_terminal(ballot: Ballot, question: str) -> None:
    """Ask until all is judged, or the person ends; Ctrl-C ends at once, and no vote is lost."""
    print(HELP)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # waiting for a line would see no flag
    try:
        while True:
            pair = ballot.current()
            progress = f"{len(ballot.votes)} of {len(ballot.pairs)} judged by {ballot.rater}"
            print(AT_THE_END if pair is None else pair_text(pair, question, progress))
            try:
                key = input("> " if sys.stdin.isatty() else "").strip().lower()
            except EOFError:
                return
            if key == "u":
                print("taken back" if ballot.undo() else "there is no vote to take back")
            elif key == "q" or pair is None:
                return
            elif key in KEYS:
                ballot.vote(pair.id, KEYS[key])
            else:
                print(f"{visible(key[:20])!r} is none of them: {HELP}")
    except KeyboardInterrupt:
        print()
    finally:
        signal.signal(signal.SIGINT, before)


def pair_text(pair: ShownPair, question: str, progress: str) -> str:
    """A pair as text that cannot steer the terminal: control characters and marks of direction are written out.

    Every line of a model's has a bar before it, so that none can pass for one of ours.
    """
    parts = (("Prompt", pair.question), ("A", pair.left), ("B", pair.right))
    shown = [line for name, text in parts for line in (name, *barred(text))]
    return "\n".join(["", progress, *shown, visible(question)])


def barred(text: str) -> list[str]:
    """The lines of a text, safe to print, each with a bar before it."""
    return [f"  | {line}" for line in visible(text).split("\n")]


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
        self.hosts, self.question = own_hosts("127.0.0.1", self.server_port), question
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
        return {
            "asks": visible(self.question),
            "rater": ballot.rater,
            "pair": pair and {name: visible(text) for name, text in asdict(pair).items()},
            "done": len(ballot.votes),
            "total": len(ballot.pairs),
            "undo": bool(ballot.votes),
        }


class BallotHandler(RequestHandler):
    """One connection."""

    max_body_bytes = 4096
    always_sent = HEADERS
    server: BallotServer

    def answer(self) -> Answer:
        """The page, the pair to judge now, or the same after a vote, an undo or the end."""
        if self.command not in ("GET", "POST"):  # a browser that asks whether another site's page may vote, say
            raise RefusedRequest(f"{self.command}: this page takes GET and POST", HTTPStatus.METHOD_NOT_ALLOWED)
        self.require_own()
        if (self.command, self.place) == ("GET", "/"):
            return HTTPStatus.OK, PAGE
        known = ("/state",) if self.command == "GET" else ("/vote", "/undo", "/end")
        if self.place not in known:
            raise RefusedRequest(f"{self.place[:80]}: no such page", HTTPStatus.NOT_FOUND)
        given = self.headers.get(TOKEN_HEADER, "")
        ballot = next((ballot for token, ballot in self.server.ballots.items() if brings(given, token)), None)
        if ballot is None:
            raise RefusedRequest("no rater's token: open the address that the terminal shows", HTTPStatus.FORBIDDEN)
        status = HTTPStatus.OK if self.command == "GET" else self.act(ballot, self.body())
        return status, self.server.state(ballot)

    def act(self, ballot: Ballot, body: dict[str, Any]) -> HTTPStatus:
        """Save a vote, take one back, or note the end."""
        try:
            if self.place == "/vote":
                choice, pair = body.get("choice"), body.get("pair")
                if not isinstance(pair, str) or choice not in CHOICES:
                    raise RefusedRequest(f"a vote has a pair and a choice of {', '.join(CHOICES)}")
                ballot.vote(pair, str(choice))
            elif self.place == "/undo":
                ballot.undo()
            else:
                self.server.end(ballot)
        except StaleVote:
            return HTTPStatus.CONFLICT
        except RunError as error:  # a disk that is full
            raise RefusedRequest(str(error), HTTPStatus.INSUFFICIENT_STORAGE) from error
        return HTTPStatus.OK


def ask_on_pages(ballots: Sequence[Ballot], question: str, *, port: int, stopping: Callable[[], bool]) -> None:
    try:
        server = BallotServer(ballots, question, port=port)
    except OSError as error:
        raise UserError(f"--port {port}: cannot listen there ({error.strerror}).  Choose another port.") from error
    with server:
        answering = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        answering.start()
        for ballot in ballots:
            num_pairs = len(ballot.pairs)
            print(f"{ballot.rater}: {num_pairs - len(ballot.votes)} of {num_pairs} pairs to judge at")
            print(f"    {server.addresses[ballot.rater]}", flush=True)
        print("End with the button on the page or Ctrl-C: votes are kept, and --resume continues.", flush=True)
        while not server.ended.wait(LOOK_SECONDS) and not stopping():
            pass
        server.shutdown()
        answering.join()
