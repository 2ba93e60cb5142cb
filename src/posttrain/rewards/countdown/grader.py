"""Countdown's puzzle, the verdict on an answer to it, and credit for coming near.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, cast

from annotated_types import Gt, Lt

from posttrain.errors import UserError
from posttrain.options.bounds import Bounded
from posttrain.options.task import FormatMode, NumbersRule
from posttrain.rewards.grading.answers import Array, Column, Graded, Texts
from posttrain.rewards.parsing.arithmetic import literals, postfix, value
from posttrain.rewards.parsing.tags import WHITE_SPACE, answer_text, gives_answer


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
        return Outcome.MALFORMED if gives_answer(text) else Outcome.NO_ANSWER
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
    *,
    completions: Texts,
    finish_reasons: Texts,
    numbers: Column,
    target: Column,
    rule: Column | None = None,
    **_: Any,
) -> list[Graded]:
    """Reward function: 1 for a correct answer in the `strict` structure; a missing `rule` column means `all`."""
    return grades("strict", completions, finish_reasons, puzzles(numbers, target, rule))


def countdown_last(
    *,
    completions: Texts,
    finish_reasons: Texts,
    numbers: Column,
    target: Column,
    rule: Column | None = None,
    **_: Any,
) -> list[Graded]:
    """Reward function: 1 for a correct answer in the `last` structure; a missing `rule` column means `all`."""
    return grades("last", completions, finish_reasons, puzzles(numbers, target, rule))


def grades(mode: FormatMode, completions: Texts, finish_reasons: Texts, problems: Sequence[Countdown]) -> list[Graded]:
    rows = zip(problems, completions, finish_reasons, strict=True)
    outcomes = [countdown_outcome(puzzle, text, mode=mode, cut_off=finish == "length") for puzzle, text, finish in rows]
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
        return [
            Graded(self.credit * self.nearness(text, cast(int, goal)), graded.outcome)
            if graded.outcome is Outcome.WRONG_VALUE
            else graded
            for graded, text, goal in zip(verdicts, completions, target, strict=True)
        ]

    def nearness(self, text: str, target: int) -> float:
        tokens = postfix((answer_text(text, self.mode) or "").strip(WHITE_SPACE))
        assert tokens is not None, text
        found = value(tokens)
        off = abs(Fraction(*found) - target) / max(target, 1) if found is not None else 1
        return 1.0 - float(off) if off < 1 else 0.0
