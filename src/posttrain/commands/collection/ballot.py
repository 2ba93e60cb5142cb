"""A person's way through the pairs: which is asked next, which side each completion is on, votes and how to undo them.

A page and a terminal show the same ballot.  Every vote is on the disk before the next pair is shown, so that whoever
comes back goes on where they stopped, and nothing is asked twice.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.commands.collection.pair_choice import Pair, lot
from posttrain.commands.collection.verdicts import standing_votes
from posttrain.errors import UserError
from posttrain.runs.files import LineJournal

CHOICES = ("left", "right", "tie", "skip")


class StaleVote(Exception):
    """A vote on a pair that is not the one asked about: another window has voted, or a button was pressed twice."""


@dataclass(frozen=True, slots=True)
class ShownPair:
    """A pair as a person sees it."""

    id: str
    question: str
    """The prompt."""
    left: str
    right: str


class Ballot:
    """One rater's votes on a list of pairs."""

    def __init__(self, pairs: Sequence[Pair], journal: LineJournal, *, rater: str, seed: int) -> None:
        """Take up where the journal, which all raters of a folder share, says that this one stopped."""
        if not rater.strip() or not rater.isprintable():
            raise UserError(f"rater {rater!r}: is no name that can be shown; use letters, such as anna")
        self.pairs, self.journal, self.rater, self.seed = {pair.id: pair for pair in pairs}, journal, rater, seed
        self._lock = threading.Lock()
        standing = standing_votes(journal.records()).get(rater, {})
        self._votes = {pair: vote for pair, vote in standing.items() if pair in self.pairs}

    @property
    def num_pairs(self) -> int:
        """All there are."""
        return len(self.pairs)

    @property
    def num_done(self) -> int:
        """Those that this rater has voted on or skipped."""
        return len(self._votes)

    @property
    def votes(self) -> Mapping[str, str]:
        """By pair: first, second, tie or skip."""
        return dict(self._votes)

    def current(self) -> ShownPair | None:
        """The pair to be judged now; None where all are."""
        with self._lock:
            pair = self._current()
        return None if pair is None else self._shown(pair)

    def vote(self, pair_id: str, choice: str) -> None:
        """Put a vote on the current pair on the disk.  Raises StaleVote for any other pair."""
        assert choice in CHOICES, choice
        with self._lock:
            pair = self._current()
            if pair is None or pair.id != pair_id:
                raise StaleVote(pair_id)
            left = self._left(pair)
            right = "second" if left == "first" else "first"
            vote = {"left": left, "right": right}.get(choice, choice)
            self.journal.append([{"rater": self.rater, "pair": pair.id, "vote": vote, "left": left}])
            self._votes[pair.id] = vote

    def undo(self) -> bool:
        """Take the last vote that stands back, so that its pair is asked about again; whether there was one."""
        with self._lock:
            if not self._votes:
                return False
            last = next(reversed(self._votes))
            self.journal.append([{"rater": self.rater, "undone": last}])
            del self._votes[last]
            return True

    def progress(self) -> dict[str, Any]:
        """How far this rater is."""
        return {"done": self.num_done, "total": self.num_pairs, "undo": bool(self._votes)}

    def _current(self) -> Pair | None:
        return next((pair for pair in self.pairs.values() if pair.id not in self._votes), None)

    def _left(self, pair: Pair) -> str:
        """Which of the pair stands on the left: drawn by lot for each rater."""
        return "first" if lot(self.seed, f"side for {self.rater}", pair.id) % 2 else "second"

    def _shown(self, pair: Pair) -> ShownPair:
        texts = pair.first.text, pair.second.text
        left, right = texts if self._left(pair) == "first" else texts[::-1]
        return ShownPair(id=pair.id, question=pair.prompt.question, left=left, right=right)
