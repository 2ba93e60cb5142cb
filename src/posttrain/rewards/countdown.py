"""Countdown's puzzle, the verdict on an answer, credit for coming near, and a process reward for the steps of a search.

**What is read.**  The graded text is the prefilled start of the answer plus the completion, without its stop token.
Its answer is found by the structure of posttrain.rewards.parsing.tags, in mode `strict` or `last`; stripped of ASCII
white space, it must be an expression of posttrain.rewards.parsing.arithmetic.

**What earns what.**  CORRECT is worth 1, every other outcome 0.  The outcome is the first of these that holds:

- TRUNCATED: the structure is missing, and the length limit cut the completion off.
- NO_ANSWER: the structure is missing, and no `<answer>` is followed by an `</answer>`.
- MALFORMED: the answer is outside the structure, or is not an expression (an empty one included).
- WRONG_NUMBERS: the multiset of literals is not that of the given numbers (`all`), or not within it (`subset`).
- WRONG_VALUE: the exact value is not the target, or there is a division by zero.
- CORRECT.

**Known hacks, and what stops them.**  Code and giant powers in the answer: parsed, never evaluated.  One number used
twice: multisets.  A near miss or a float tolerance: exact fractions.  Several answers: `strict` admits one, `last`
takes the last.  Text that is slow to read: linear time.  Not stopped: a guess without thinking earns as much as a
search.
"""

import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import islice
from typing import Annotated, Any, cast

from annotated_types import Gt, Lt

from posttrain.errors import UserError, require
from posttrain.options.bounds import Bounded
from posttrain.options.task import FormatMode, NumbersRule
from posttrain.rewards.grading.answers import CUT_OFF, Array, Column, Graded, ProcessReward, Span, Texts
from posttrain.rewards.parsing.arithmetic import apply, literals, postfix, value
from posttrain.rewards.parsing.tags import ANSWER, END_ANSWER, END_THINK, THINK, WHITE_SPACE, answer_text


@dataclass(frozen=True, slots=True)
class Countdown:
    """One puzzle: make `target` from `numbers`."""

    numbers: tuple[int, ...]
    """Each >= 0."""
    target: int
    rule: NumbersRule = "all"


class Outcome(StrEnum):
    """How an answer fared, by the rules above."""

    CORRECT = "correct"
    WRONG_VALUE = "wrong_value"
    WRONG_NUMBERS = "wrong_numbers"
    MALFORMED = "malformed"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"


def countdown_outcome(puzzle: Countdown, text: str, *, mode: FormatMode = "strict", cut_off: bool = False) -> Outcome:
    """Whether a text solves the puzzle, or how it fails; `cut_off`: the length limit ended it."""
    answer = answer_text(text, mode)
    if answer is None:
        if cut_off:
            return Outcome.TRUNCATED
        return Outcome.MALFORMED if END_ANSWER in text.partition(ANSWER)[2] else Outcome.NO_ANSWER
    tokens = postfix(answer.strip(WHITE_SPACE))
    if tokens is None:
        return Outcome.MALFORMED
    used, given = Counter(literals(tokens)), Counter(map(str, puzzle.numbers))  # no hostile literal becomes an integer
    if not used <= given or (puzzle.rule == "all" and used != given):
        return Outcome.WRONG_NUMBERS
    result = value(tokens)
    if result is None or result[0] != puzzle.target * result[1]:
        return Outcome.WRONG_VALUE
    return Outcome.CORRECT


def countdown(
    *, completions: Texts, finish_reasons: Texts, numbers: Column, target: Column, rule: Column | None = None, **_: Any
) -> list[Graded]:
    """Reward function: 1 for a correct answer in the `strict` structure; a missing `rule` column means `all`."""
    return grades("strict", completions, finish_reasons, puzzles(numbers, target, rule))


def countdown_last(
    *, completions: Texts, finish_reasons: Texts, numbers: Column, target: Column, rule: Column | None = None, **_: Any
) -> list[Graded]:
    """Reward function: 1 for a correct answer in the `last` structure; a missing `rule` column means `all`."""
    return grades("last", completions, finish_reasons, puzzles(numbers, target, rule))


def grades(mode: FormatMode, completions: Texts, finish_reasons: Texts, problems: Sequence[Countdown]) -> list[Graded]:
    rows = zip(problems, completions, finish_reasons, strict=True)
    outcomes = [countdown_outcome(puzzle, text, mode=mode, cut_off=finish in CUT_OFF) for puzzle, text, finish in rows]
    return [Graded(float(outcome is Outcome.CORRECT), outcome) for outcome in outcomes]


def puzzles(numbers: Column, target: Column, rule: Column | None) -> list[Countdown]:
    rules = ["all"] * len(target) if rule is None else rule
    return [puzzle(*row) for row in zip(numbers, target, rules, strict=True)]


def puzzle(numbers: Any, target: object, rule: object) -> Countdown:
    """A row's puzzle.  Raises UserError: a target of "36" would otherwise score 0 for every completion."""
    is_list = isinstance(numbers, (list, tuple)) or (isinstance(numbers, Array) and len(numbers.shape) == 1)
    given, goal = [as_integer(each) for each in numbers] if is_list else [None], as_integer(target)
    known = tuple(each for each in given if each is not None and each >= 0)
    if len(known) < len(given):
        raise UserError(f"numbers = {numbers!r}: must be a list of whole numbers, at least 0")
    if goal is None:
        raise UserError(f"target = {target!r}: must be a whole number, not text or a boolean")
    if rule not in ("all", "subset"):
        raise UserError(f"rule = {rule!r}: must be all or subset")
    return Countdown(known, goal, rule)


def as_integer(value: Any) -> int | None:
    """A value's whole number, also numpy's and torch's; None for a boolean."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several, a tensor of fractions
        return None


@dataclass(frozen=True, kw_only=True)
class CountdownCredit(Bounded):
    """Reward function: 1 for a correct answer, up to `credit` for a near one; for tasks too hard to solve by chance.

        credit · max(0, 1 - |value - target| / max(target, 1))   for WRONG_VALUE with the numbers used by the rule

    Near is cheaper than right: a policy learns to add the numbers up and stops searching once a try is close.  Its
    reward rises while its accuracy does not: watch that, keep the credit small, or let its weight fall (`weight_to`).
    """

    credit: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Score of an answer very near the target."""
    mode: FormatMode = "strict"
    """How much of a text must have the structure."""

    def __call__(self, /, *, completions: Texts, numbers: Column, target: Column, **columns: Any) -> list[Graded]:
        grader = countdown if self.mode == "strict" else countdown_last
        verdicts = grader(completions=completions, numbers=numbers, target=target, **columns)
        for row, graded in enumerate(verdicts):
            if graded.outcome is Outcome.WRONG_VALUE:
                goal = cast(int, target[row])
                tokens = postfix((answer_text(completions[row], self.mode) or "").strip(WHITE_SPACE))
                found = value(tokens or [])
                off = abs(Fraction(*found) - goal) / max(goal, 1) if found is not None else 1
                verdicts[row] = Graded(self.credit * (1.0 - float(off) if off < 1 else 0.0), graded.outcome)
        return verdicts


MOST_TRIES = 1000
"""The bundled model makes about seven tries; 400 tokens have room for about 50."""


@dataclass(frozen=True, kw_only=True)
class CountdownSteps(Bounded):
    """Reward function: process rewards for the steps and tries of a Countdown search, apart from the answer.

    It reads the text between `<think>` (or the beginning) and `</think>` (or the end).  Its lines are tries in the
    bundled model's notation: steps `a+b=c,c*d=e`, with or without a verdict after them; other lines are skipped.  Lines
    are parsed, never evaluated, in linear time; tries beyond the first MOST_TRIES are not read.

    A step is right if its numbers are on the table, once each, and its result is correct: an integer, not below 0.  It
    takes them off the table and puts the result there.  A try is complete if all its steps are right and, under the
    rule `all`, one number is left; it hits if the last result is then the target.  A try is read up to its first fault:
    what follows a wrong step is neither right nor wrong.

    The score is 0.  Spans are marked, in the order of the text: right steps, wrong ones, and complete tries on their
    whole line.  A repeated right step earns 0.  Later marks are 0 once earnings, or charges, reach `most`.  The answer,
    which earns 1, always weighs more, as long as this reward's weight is at most that of the answer's.

    Known hacks, and what stops them: one right step, or one try, repeated is paid once, also with its numbers swapped;
    sums about other numbers are not on the table; every possible sum: `most`; big numbers: nine digits.  Not stopped:
    new tries that do not look for the target, and a hit that is not given as the answer; watch the accuracy.
    """

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
        for span in self.marks(puzzle, text):
            if span.value > 0:
                span = span._replace(value=min(span.value, self.most - earned))
                earned += span.value
            else:
                span = span._replace(value=-min(-span.value, self.most - charged))
                charged -= span.value
            spans.append(span)
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
            break
        operator, a, b, result = found[2], int(found[1]), int(found[3]), int(found[4])
        right = Counter((a, b)) <= Counter(table) and apply(operator, a, b) == result
        sides = (min(a, b), max(a, b)) if operator in "+*" else (a, b)
        begin = start + piece.index(found[0])
        steps.append(Equation(begin, begin + len(found[0]), (operator, *sides), right))
        if not right:
            break
        table.remove(a)
        table.remove(b)
        table.append(result)
        start += len(piece) + 1
    else:
        complete = puzzle.rule == "subset" or len(table) == 1
        return Try(tuple(steps), complete, hits=complete and table[-1] == puzzle.target)
    return Try(tuple(steps), complete=False, hits=False)
