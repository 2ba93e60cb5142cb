"""Signs of behaviours in the bundled model's search notation: tries, right steps, verdicts, going back, giving up.

The model writes no prose.  posttrain.rewards.countdown.step_rewards defines how its lines are read.  Time is linear in
the text; tries beyond the first `MOST_TRIES` are ignored.
"""

from dataclasses import dataclass
from itertools import islice, pairwise

from posttrain.rewards.countdown.grader import Countdown
from posttrain.rewards.countdown.step_rewards import HIT, MISS, MOST_TRIES, Try, lines_of_tries, read_try
from posttrain.rewards.parsing.tags import END_THINK

Key = tuple[tuple[str, int, int], ...]
"""The steps of a try, in order."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Signs of one behaviour in one completion."""

    count: int
    shown: bool
    """Whether the count is enough to show the behaviour."""


@dataclass(frozen=True, slots=True)
class SearchReading:
    """The tries of a completion, each with the verdict behind it, and whether the thinking has an end."""

    tries: tuple[Try, ...]
    verdicts: tuple[str, ...]
    """`!`, `.` or nothing, for each try."""
    closed: bool


def read_search(puzzle: Countdown, text: str) -> SearchReading:
    """The search that a completion writes down."""
    lines = [line for _, line in islice(lines_of_tries(text), MOST_TRIES)]
    verdicts = tuple(line[-1] if line[-1] in HIT + MISS else "" for line in lines)
    return SearchReading(tuple(read_try(puzzle, line) for line in lines), verdicts, END_THINK in text)


def several_tries(search: SearchReading) -> Signs:
    """Tries; shown by two or more."""
    return Signs(len(search.tries), len(search.tries) >= 2)


def right_steps(search: SearchReading) -> Signs:
    """Right steps; shown where there are tries and all of them are right to their end."""
    right = sum(step.right for each in search.tries for step in each.steps)
    return Signs(right, bool(search.tries) and all(each.complete for each in search.tries))


def right_verdicts(search: SearchReading) -> Signs:
    """Verdicts that agree with what a try comes to; shown where every try has one."""
    right = sum(
        each.complete and verdict == (HIT if each.hits else MISS)
        for each, verdict in zip(search.tries, search.verdicts, strict=True)
    )
    return Signs(right, 0 < right == len(search.tries))


def checked_again(search: SearchReading) -> Signs:
    """Complete tries that repeat an earlier one; the order of their steps is ignored."""
    made = [frozenset(key(each)) for each in search.tries if each.complete]
    return shown_by_one(len(made) - len(set(made)))


def went_back(search: SearchReading) -> Signs:
    """Tries that keep the first step of the try before and change the rest: a branch is explored again."""
    keys = [key(each) for each in search.tries]
    return shown_by_one(sum(bool(a) and a[:1] == b[:1] and a != b for a, b in pairwise(keys)))


def gave_up(search: SearchReading) -> Signs:
    """Thinking that ends although no try hit the target."""
    return shown_by_one(int(search.closed and bool(search.tries) and not any(each.hits for each in search.tries)))


def key(attempt: Try) -> Key:
    """The identity of a try: its steps in order."""
    return tuple(step.key for step in attempt.steps)


def shown_by_one(count: int) -> Signs:
    """`count` signs, one of which is enough."""
    return Signs(count, count >= 1)
