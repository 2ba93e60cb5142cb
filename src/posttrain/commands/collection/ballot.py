"""One person's votes on the pairs: which pair is next, which side each completion is on, votes and undo.

The terminal and the page on this machine show the same ballot.  Each vote is on disk before the next pair is shown, so
nothing is asked twice.
"""

import signal
import sys
import threading
from collections.abc import Callable, Sequence

from posttrain.commands.collection.pairs import Pair, lot, standing_votes
from posttrain.errors import UserError
from posttrain.runs.files import LineJournal
from posttrain.runs.progress import visible
from posttrain.server.votes import CHOICES, ShownPair, StaleVote


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
        """The next pair to judge; None if all are judged."""
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
        """Undo the last vote, so that its pair is asked again; returns whether there was one."""
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
AT_THE_END = "Every pair is judged.  u undoes the last vote; anything else quits."


def ask_in_terminal(ballot: Ballot, question: str) -> None:
    """Ask until all pairs are judged or the person quits; Ctrl-C quits immediately, and no vote is lost."""
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
                print("vote undone" if ballot.undo() else "there is no vote to undo")
            elif key == "q" or pair is None:
                return
            elif key in KEYS:
                ballot.vote(pair.id, KEYS[key])
            else:
                print(f"{visible(key[:20])!r} is not a choice: {HELP}")
    except KeyboardInterrupt:
        print()
    finally:
        signal.signal(signal.SIGINT, before)


def pair_text(pair: ShownPair, question: str, progress: str) -> str:
    """A pair as text that is safe for the terminal: control and direction characters are escaped.

    A bar marks each line of the model's text, so that it cannot imitate one of ours.
    """
    parts = (("Prompt", pair.question), ("A", pair.left), ("B", pair.right))
    shown = [line for name, text in parts for line in (name, *barred(text))]
    return "\n".join(["", progress, *shown, visible(question)])


def barred(text: str) -> list[str]:
    """The lines of a text, safe to print, each marked with a bar."""
    return [f"  | {line}" for line in visible(text).split("\n")]


LOOK_SECONDS = 0.2
"""Interval between checks whether voting should stop."""


def ask_on_pages(ballots: Sequence[Ballot], question: str, *, port: int, stopping: Callable[[], bool]) -> None:
    from posttrain.server.voting_page import VotingPage

    with VotingPage(ballots, question, port=port).in_thread() as page:
        for ballot in ballots:
            num_pairs = len(ballot.pairs)
            print(f"{ballot.rater}: {num_pairs - len(ballot.votes)} of {num_pairs} pairs to judge at")
            print(f"    {page.addresses[ballot.rater]}", flush=True)
        print("Finish with the button on the page or Ctrl-C: votes are saved, and --resume continues.", flush=True)
        while not page.ended.wait(LOOK_SECONDS) and not stopping():
            pass
