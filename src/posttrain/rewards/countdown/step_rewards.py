"""Countdown's process reward: for single steps and tries of a search, apart from the answer.

**What is read.**  The thinking: the text between `<think>` (or the beginning) and `</think>` (or the end).  Its lines
are tries in the bundled model's notation: steps `a+b=c,c*d=e`, with or without a verdict after them; other lines are
skipped.  Lines are parsed, never evaluated, in linear time; tries beyond the first MOST_TRIES are not read.

A step is right if its numbers are on the table, once each, and its result is correct: an integer, not below 0.  It
takes them off the table and puts the result there.  A try is complete if all its steps are right and, under the rule
`all`, one number is left; it hits if the last result is then the target.  A try is read up to its first fault: what
follows a wrong step is neither right nor wrong.

**What earns what.**  The score is 0.  Spans are marked, in the order of the text:

- a right step that is new in this completion: `step`; a repeated one: 0;
- a wrong step: minus `cost`;
- a complete try that is new in this completion: `hit` for the first that reaches the target, else `attempt`; a
  repeated one: minus `cost`.  The mark is on the whole line.

Total earnings stop at `most`, and so do total charges: later marks are 0.  The answer, which earns 1, always weighs
more, as long as this reward's weight is at most that of the answer's.

**Known hacks, and what stops them.**  One right step, or one try, repeated: paid once, also with its numbers swapped.
Sums about other numbers: they are not on the table.  Every possible sum: `most`.  Big numbers: nine digits.  Not
stopped: new tries that do not look for the target, which pay `attempt` until `most`, and a hit that is not given as the
answer; watch the accuracy.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from annotated_types import Gt, Lt

from posttrain.errors import require
from posttrain.options.bounds import Bounded
from posttrain.rewards.countdown.grader import Countdown, puzzles
from posttrain.rewards.grading.answers import Column, ProcessReward, Span, Texts
from posttrain.rewards.parsing.arithmetic import apply
from posttrain.rewards.parsing.tags import END_THINK, THINK

MOST_TRIES = 1000
"""The bundled model makes about seven tries; 400 tokens have room for about 50."""


@dataclass(frozen=True, kw_only=True)
class CountdownSteps(Bounded):
    """Reward function: process rewards for the steps and tries of a Countdown search; its score is 0."""

    step: float = 0.02
    """Reward of a right step that is new in its completion."""
    attempt: float = 0.02
    """Reward of a complete try that is new and misses."""
    hit: float = 0.2
    """Reward of the first try that reaches the target."""
    cost: float = 0.05
    """Charge for a wrong step, and for a repeated try."""
    most: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Most that a completion earns in all, and most that it is charged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("step", "attempt", "hit", "cost"):
            require(0 <= getattr(self, name) <= self.most, self, name, f"must be from 0 to most = {self.most}")

    def __call__(
        self, /, *, completions: Texts, numbers: Column, target: Column, rule: Column | None = None, **_columns: Any
    ) -> list[ProcessReward]:
        rows = zip(puzzles(numbers, target, rule), completions, strict=True)
        return [ProcessReward(0.0, spans=self.bounded(puzzle, text)) for puzzle, text in rows]

    def bounded(self, puzzle: Countdown, text: str) -> list[Span]:
        """The marks on a completion, with `most` applied."""
        earned, charged = 0.0, 0.0
        spans: list[Span] = []
        for start, end, value in self.marks(puzzle, text):
            if value > 0:
                value = min(value, self.most - earned)
                earned += value
            else:
                value = -min(-value, self.most - charged)
                charged -= value
            spans.append(Span(start, end, value))
        return spans

    def marks(self, puzzle: Countdown, text: str) -> Iterator[Span]:
        """The value of each step and try without `most`, in order of their ends."""
        steps_made, tries_made, found = set[tuple[str, int, int]](), set[frozenset[tuple[str, int, int]]](), False
        for start, line in islice(lines_of_tries(text), MOST_TRIES):
            attempt = read_try(puzzle, line)
            for step in attempt.steps:
                fresh = self.step if step.key not in steps_made else 0.0
                yield Span(start + step.start, start + step.end, fresh if step.right else -self.cost)
                steps_made.add(step.key)
            if attempt.complete:
                made = frozenset(step.key for step in attempt.steps)
                hits = attempt.hits and not found
                value = -self.cost if made in tries_made else self.hit if hits else self.attempt
                yield Span(start, start + len(line), value)
                tries_made.add(made)
                found = found or attempt.hits


def lines_of_tries(text: str) -> Iterator[tuple[int, str]]:
    """(start, line) of the stripped lines of a completion's thinking that begin with a step."""
    opened = text.find(THINK)
    start = 0 if opened < 0 else opened + len(THINK)
    closed = text.find(END_THINK, start)
    for line in text[start : len(text) if closed < 0 else closed].split("\n"):
        stripped = line.strip()
        if STEP.match(stripped) is not None:
            yield start + line.index(stripped), stripped
        start += len(line) + 1


HIT, MISS = "!", "."
"""The searcher's verdict on a try: whether it found the target."""
STEP = re.compile(r"([0-9]{1,9})([-+*/])([0-9]{1,9})=([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation of a try."""

    start: int
    end: int
    """Its characters in the line are [start, end)."""
    key: tuple[str, int, int]
    right: bool


@dataclass(frozen=True, slots=True)
class Try:
    """One line of a search."""

    steps: tuple[Equation, ...]
    complete: bool
    hits: bool


def read_try(puzzle: Countdown, line: str) -> Try:
    """The steps of a line, and whether it is complete and hits the target."""
    table, steps, start = list(puzzle.numbers), list[Equation](), 0
    for piece in line.rstrip(HIT + MISS).split(","):
        found = STEP.fullmatch(piece.strip())
        if found is None:
            return Try(tuple(steps), complete=False, hits=False)
        operator, a, b, result = found[2], int(found[1]), int(found[3]), int(found[4])
        right = Counter((a, b)) <= Counter(table) and apply(operator, a, b) == result
        sides = (min(a, b), max(a, b)) if operator in "+*" else (a, b)
        begin = start + piece.index(found[0])
        steps.append(Equation(begin, begin + len(found[0]), (operator, *sides), right))
        if not right:
            return Try(tuple(steps), complete=False, hits=False)
        table.remove(a)
        table.remove(b)
        table.append(result)
        start += len(piece) + 1
    complete = puzzle.rule == "subset" or len(table) == 1
    return Try(tuple(steps), complete, hits=complete and table[-1] == puzzle.target)
