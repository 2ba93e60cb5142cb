"""A Countdown search as it is written: tries, one a line, of steps `a+b=c,c*d=e`, with or without a verdict behind.

A step is right when its numbers are on the table, once each, and its result is theirs: an integer, not below 0.  It
takes them off the table and puts the result there.  A try is complete when all of its steps are right and, under the
rule `all`, one number is left; it hits when the last result is then the target.  A try is read up to its first fault:
what rests on a wrong step is neither right nor wrong.
"""

import re
from dataclasses import dataclass

from posttrain.rewards.countdown.arithmetic import apply
from posttrain.rewards.countdown.grader import Countdown

HIT, MISS = "!", "."
"""The verdict of whoever searches on a try: it found the target, or it did not."""
STEP = re.compile(r"([0-9]{1,9})([-+*/])([0-9]{1,9})=([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation of a try."""

    start: int
    end: int
    """Its characters in the line are [start, end)."""
    key: tuple[str, int, int]
    """Operator and numbers; the order of the numbers is kept only where it matters."""
    right: bool


@dataclass(frozen=True, slots=True)
class Try:
    """One line of a search."""

    steps: tuple[Equation, ...]
    """Up to the first that is wrong, or to what is no step."""
    complete: bool
    hits: bool


def read_try(puzzle: Countdown, line: str) -> Try:
    """The steps of a line, and what they come to."""
    table, steps, start = list(puzzle.numbers), list[Equation](), 0
    for piece in line.rstrip(HIT + MISS).split(","):
        found = STEP.fullmatch(piece.strip())
        if found is None:
            return Try(tuple(steps), complete=False, hits=False)
        operator, a, b, result = found[2], int(found[1]), int(found[3]), int(found[4])
        right = taken(table, a) and taken(table, b) and apply(operator, a, b) == result
        sides = (min(a, b), max(a, b)) if operator in "+*" else (a, b)
        begin = start + piece.index(found[0])
        steps.append(Equation(begin, begin + len(found[0]), (operator, *sides), right))
        if not right:
            return Try(tuple(steps), complete=False, hits=False)
        table.append(result)
        start += len(piece) + 1
    complete = puzzle.rule == "subset" or len(table) == 1
    return Try(tuple(steps), complete, hits=complete and table[-1] == puzzle.target)


def taken(table: list[int], number: int) -> bool:
    """Take a number off the table, if it is there."""
    if number not in table:
        return False
    table.remove(number)
    return True
