"""Answers compared as text, number or arithmetic, without evaluating anything: exact matches and generated problems.

`exact_match` is for answers that are one text: the letter of a choice, a word, a formula, a number.  It reads what
follows the last `</think>`: the last closed `<answer>…</answer>`, else the last box, else everything.  It pays 1 if it
is the column `answer` (or `ground_truth`): the same text apart from blanks (and letter case, for a single word), or the
same exact number.  A gold answer of one capital letter is a choice, which may also be written `(B)`, `B.` or `B)`.  A
row without an answer is not scored.  Known hack: a guess is right as often as there are few choices.

reasoning-gym's scorers evaluate some answers as Python, pay for an answer that the text merely contains, and accept any
four numbers for those of a puzzle.  So what can be compared here is compared here; problems with many right answers go
to its scorer, only inside the sandbox, and behind a grammar if it evaluates them.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from posttrain.rewards.gold_answers import AnswerOutcome, gold_answer, graded_answer, missing_answer
from posttrain.rewards.grading.answers import Column, Graded, Texts
from posttrain.rewards.parsing import arithmetic
from posttrain.rewards.parsing.exact_numbers import exact
from posttrain.rewards.parsing.final_answers import last_boxed
from posttrain.rewards.parsing.tags import after_thinking, last_answer

CHOICE = re.compile(r"[A-Z]")
CHOSEN = re.compile(r"\(?([A-Za-z])\)?[.:]?")
"""A choice, by itself."""


def exact_match(
    *,
    completions: Texts,
    finish_reasons: Texts,
    answer: Column | None = None,
    ground_truth: Column | None = None,
    **_columns: object,
) -> list[Graded]:
    """Reward function: 1 for an answer equal to the row's."""
    given = answer if answer is not None else ground_truth
    golds = [None] * len(completions) if given is None else given
    rows = zip(completions, finish_reasons, golds, strict=True)
    return [matched(text, reason == "length", gold) for text, reason, gold in rows]


def matched(text: str, cut_off: bool, given: object) -> Graded:
    """The verdict on one completion."""
    gold = (given.strip() or None) if isinstance(given, str) else gold_answer(given).text
    if gold is None:
        return Graded(None, AnswerOutcome.NO_GOLD)
    found = final_text(text, cut_off=cut_off)
    if not found:
        return missing_answer(cut_off)
    chosen = CHOSEN.fullmatch(found) if CHOICE.fullmatch(gold) else None
    right = len(found) <= MAX_CHARACTERS and (chosen[1].upper() == gold if chosen else same_answer(found, gold))
    return graded_answer(right)


class Scorer(StrEnum):
    """How a right answer is recognised."""

    SAME = "same"
    """The gold answer's text, or exactly its number."""
    TEXT = "text"
    """The gold answer's text only: the question may be an equal number."""
    LISTED = "listed"
    """One of the answers that the problem lists."""
    ARITHMETIC = "arithmetic"
    """Arithmetic over the problem's numbers, each exactly once, that makes its target."""
    EXPRESSION = "expression"
    """reasoning-gym's scorer in the sandbox, behind a grammar of expressions: it evaluates them."""
    GYM = "gym"
    """reasoning-gym's scorer in the sandbox."""


OURS = {
    # Those that evaluate what they score: `eval`, sympy's `parse_expr`.
    "countdown": Scorer.ARITHMETIC,
    "puzzle24": Scorer.ARITHMETIC,
    "n_queens": Scorer.LISTED,
    "string_insertion": Scorer.SAME,
    "spiral_matrix": Scorer.SAME,
    "binary_matrix": Scorer.SAME,
    "number_sorting": Scorer.SAME,
    "polynomial_multiplication": Scorer.EXPRESSION,
    "simple_integration": Scorer.EXPRESSION,
    "intermediate_integration": Scorer.EXPRESSION,
    # Those that pay in full for other texts than the one right answer: any text if it is False, the answer twice or
    # among others, one root of two (benchmarks/gym_scoring.py).
    "fraction_simplification": Scorer.TEXT,
    "game_of_life_halting": Scorer.SAME,
    "gsm_symbolic": Scorer.SAME,
    "letter_jumble": Scorer.SAME,
    "polynomial_equations": Scorer.SAME,
    "spell_backward": Scorer.SAME,
    "time_intervals": Scorer.SAME,
}
"""Generators whose scorer is not used, or only behind a grammar, and what replaces it."""


def scorer_of(generator: str, *, one_answer: bool) -> Scorer:
    """How a generator's answers are scored; `one_answer`: the library has only one right answer."""
    return OURS.get(generator, Scorer.SAME if one_answer else Scorer.GYM)


MAX_CHARACTERS = 10_000
"""A longer answer is not read."""
NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)(?![a-z])", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z]+")
NAMES = {
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMPRTUVWXYZ",
    *("pi", "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"),
}
"""Allowed names; N, O, Q and S are functions of sympy's."""
PART = re.compile(r"\s+|\d{1,9}(?:\.\d{1,9})?(?![\w.])|\*\*|[-+*/(),]|([A-Za-z]+)(?![\w.])", re.ASCII)


def final_text(text: str, *, cut_off: bool) -> str | None:
    r"""The answer after the thinking: the last `<answer>…</answer>`, else the last `\boxed{…}`, else everything."""
    text = after_thinking(text)
    for found in (last_answer(text), last_boxed(text)):
        if found is not None:
            return found.strip()
    return None if cut_off else text.strip() or None


def same_answer(answer: str, gold: str) -> bool:
    """Whether an answer has the same text apart from blanks (and case, for one word), or the same exact number."""
    given, expected = unspaced(answer), unspaced(gold)
    if given == expected:
        return True
    if WORD.fullmatch(expected):
        return given.casefold() == expected.casefold()
    value = exact(expected)
    return value is not None and (found := exact(given)) is not None and value.same(found)


def same_text(answer: str, gold: str) -> bool:
    r"""Whether an answer is the gold text, apart from blanks, dollar signs and `\dfrac`."""
    plain_answer, plain_gold = (unspaced(text.replace("$", "").replace("\\dfrac", "\\frac")) for text in (answer, gold))
    return plain_answer == plain_gold


def is_no_number(answer: str, gold: str | None) -> bool:
    return NO_NUMBER.search(answer) is not None and NO_NUMBER.search(gold or "") is None


def unspaced(text: str) -> str:
    """A text with single blanks, stripped lines, and no empty lines around it."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def makes_target(answer: str, entry: Mapping[str, Any]) -> bool:
    numbers: Sequence[int] = entry["metadata"]["numbers"]
    target = entry["metadata"].get("target", 24)  # which is not in the entries of puzzle24
    tokens = arithmetic.postfix(answer)
    if tokens is None or sorted(arithmetic.literals(tokens)) != sorted(map(str, numbers)):
        return False
    value = arithmetic.value(tokens)
    return value is not None and value[0] == target * value[1]


def is_expression(answer: str) -> bool:
    """Whether a text is arithmetic over numbers, letters and known functions: nothing that Python could look up."""
    if len(answer) > 1000:
        return False
    at = 0
    while at < len(answer):
        part = PART.match(answer, at)
        if part is None or (part[1] is not None and part[1] not in NAMES):
            return False
        at = part.end()
    return bool(answer.strip())
