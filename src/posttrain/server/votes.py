"""What a voting page needs to know about votes."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Protocol

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


class Voter(Protocol):
    """One rater's votes on a list of pairs."""

    rater: str
    votes: dict[str, str]

    @property
    def pairs(self) -> Sized: ...

    def current(self) -> ShownPair | None: ...

    def vote(self, pair_id: str, choice: str) -> None: ...

    def undo(self) -> bool: ...
