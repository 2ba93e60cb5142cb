"""A person's way through the pairs: which is asked next, which side each completion is on, votes and undo.

A page and a terminal show the same ballot.  Every vote is on the disk before the next pair is shown, so that nothing is
asked twice.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.commands.collection.pair_choice import Pair, lot
from posttrain.commands.collection.verdicts import standing_votes
from posttrain.errors import UserError
from posttrain.runs.files import LineJournal

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

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    @property
    def num_done(self) -> int:
        return len(self.votes)

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

    def progress(self) -> dict[str, Any]:
        return {"done": self.num_done, "total": self.num_pairs, "undo": bool(self.votes)}

    def _current(self) -> Pair | None:
        return next((pair for pair in self.pairs.values() if pair.id not in self.votes), None)

    def _left(self, pair: Pair) -> str:
        """Which of the pair is on the left: random for each rater."""
        return "first" if lot(self.seed, f"side for {self.rater}", pair.id) % 2 else "second"
