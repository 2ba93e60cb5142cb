"""Reading a Countdown transcript as a search: its tries, and which of them reach the target.

A try is a line of steps `a+b=c,c*d=e` between the think tags, with or without a verdict behind it; a line that begins
otherwise is none.  It succeeds when every step is right, uses numbers that are on the table at that point, and the
last one leaves the target alone on it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.rewards.countdown.grader import Countdown
from posttrain.tasks.countdown.problems import apply

HIT, MISS = "!", "."
"""The verdict of whoever searches on a try: it found the target, or it did not."""
STEP = re.compile(r"([0-9]{1,9})([-+*/])([0-9]{1,9})=([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Search:
    """What one completion tried."""

    tries: int
    successes: int
    at_once: bool = False
    """Whether the first try succeeds."""


def search(puzzle: Countdown, text: str) -> Search:
    """Count the tries of a completion and those that solve the puzzle; text after `</think>` is not part of it."""
    lines = text.split("</think>")[0].replace("<think>", "").split("\n")
    tries = [line for line in lines if STEP.match(line.strip())]
    solved = [solves(puzzle, line) for line in tries]
    return Search(tries=len(tries), successes=sum(solved), at_once=solved[:1] == [True])


def solves(puzzle: Countdown, line: str) -> bool:
    """Whether the steps of one try turn the numbers into the target."""
    table = list(puzzle.numbers)
    for step in line.rstrip(HIT + MISS).split(","):
        found = STEP.fullmatch(step.strip())
        if found is None:
            return False
        a, b, result = int(found[1]), int(found[3]), int(found[4])
        if not taken(table, a) or not taken(table, b) or apply(found[2], a, b) != result:
            return False
        table.append(result)
    return table[-1:] == [puzzle.target] and (puzzle.rule == "subset" or len(table) == 1)


def taken(table: list[int], number: int) -> bool:
    """Take a number off the table, if it is there."""
    if number not in table:
        return False
    table.remove(number)
    return True


def search_statistics(searches: Sequence[Search]) -> dict[str, float]:
    """Mean tries per completion, successes per try over all tries, and over first tries; nothing where nobody tries.

    A search ends at its first hit, so problems that are hard for the policy fill most of the tries: a policy that
    searches on may lower its successes per try and be no worse at trying.  First tries are one for each completion.
    """
    tries = sum(search.tries for search in searches)
    if not tries:
        return {}
    successes = sum(search.successes for search in searches)
    return {
        "tries_per_completion": tries / len(searches),
        "success_per_try": successes / tries,
        "success_of_first_try": sum(search.at_once for search in searches) / len(searches),
    }
