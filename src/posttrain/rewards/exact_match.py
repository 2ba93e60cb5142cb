"""Answers that are one text: the letter of a choice, a word, a formula, a number.

**What is read.**  As of generated problems: behind the last `</think>`, in the last `<answer>…</answer>` or box, or
else all there is (posttrain.rewards.generated_answers).

**What earns what.**  1 where that is the column `answer` (or `ground_truth`): the same text but for blanks, and of a
word but for letter case; or the same exact number.  A gold answer of one capital letter is a choice, which `(B)`, `B.`
and `B)` say too.  A row without an answer is not scored.

**Known hacks.**  A guess is right as often as there are few choices: of four, a quarter of the time.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

from posttrain.rewards.generated_answers import MAX_CHARACTERS, final_text, same_answer
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.maths.gold_answers import gold_answers

CHOICE = re.compile(r"[A-Z]")
CHOSEN = re.compile(r"\(?([A-Za-z])\)?[.:]?")
"""How a choice is written by itself."""


class MatchOutcome(StrEnum):
    """How an answer fared."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    """No answer, and the length limit cut the completion off."""
    NO_GOLD = "no_gold"
    """The row has no answer to compare with: not scored."""


def exact_match(
    *,
    completions: Sequence[str],
    finish_reasons: Sequence[str],
    answer: Sequence[object] | None = None,
    ground_truth: Sequence[object] | None = None,
    **_columns: object,
) -> list[Graded]:
    """Reward function: 1 for an answer that is the row's own."""
    given = answer if answer is not None else ground_truth
    golds = [None] * len(completions) if given is None else [gold_as_text(value) for value in given]
    rows = zip(completions, finish_reasons, golds, strict=True)
    return [matched(text, reason == "length", gold) for text, reason, gold in rows]


def gold_as_text(value: object) -> str | None:
    """A row's answer as text; None where it has none."""
    if isinstance(value, str):
        return value.strip() or None
    (found,) = gold_answers([value], None, 1)
    return found.text


def matched(text: str, cut_off: bool, gold: str | None) -> Graded:
    """The verdict on one completion."""
    if gold is None:
        return Graded(None, MatchOutcome.NO_GOLD)
    found = final_text(text, cut_off=cut_off)
    if not found:
        return Graded(0.0, MatchOutcome.TRUNCATED if cut_off else MatchOutcome.NO_ANSWER)
    chosen = CHOSEN.fullmatch(found) if CHOICE.fullmatch(gold) else None
    right = len(found) <= MAX_CHARACTERS and (chosen[1].upper() == gold if chosen else same_answer(found, gold))
    return Graded(1.0, MatchOutcome.CORRECT) if right else Graded(0.0, MatchOutcome.WRONG)
