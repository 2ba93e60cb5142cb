"""Answers compared as text, number or arithmetic, without evaluating anything: exact matches and generated problems.

`exact_match` is for answers that are one text: the letter of a choice, a word, a formula, a number.

**What is read.**  Behind the last `</think>`: the last closed `<answer>…</answer>`, else the last box, else all of it.

**What earns what.**  1 where that is the column `answer` (or `ground_truth`): the same text but for blanks, and of a
word but for letter case; or the same exact number.  A gold answer of one capital letter is a choice, which `(B)`, `B.`
and `B)` say too.  A row without an answer is not scored.

**Known hacks.**  A guess is right as often as there are few choices: of four, a quarter of the time.

**Generated problems.**  reasoning-gym's own scorers evaluate some answers as Python, pay for an answer that the text
merely contains, and take any four numbers for those of a puzzle.  So what can be compared here is compared here; what
has many right answers goes to its scorer, inside the sandbox alone, and where that evaluates, behind a grammar.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from posttrain.rewards.gold_answers import gold_answers
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.parsing import arithmetic
from posttrain.rewards.parsing.exact_numbers import exact
from posttrain.rewards.parsing.final_answers import last_boxed
from posttrain.rewards.parsing.tags import ANSWER, END_ANSWER, END_THINK, THINK

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


class Scorer(StrEnum):
    """A way of scoring."""

    SAME = "same"
    """The answer is the row's own: the same text, or the same number exactly."""
    TEXT = "text"
    """The answer is the row's own text: an equal number may be the question."""
    LISTED = "listed"
    """One of the answers that the problem lists."""
    ARITHMETIC = "arithmetic"
    """Arithmetic over the problem's numbers, each exactly once, that comes to its target."""
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
    # Those that pay in full for other texts than the one right answer: any text where it is False, the answer twice or
    # among others, one root of two (benchmarks/gym_scoring.py).
    "fraction_simplification": Scorer.TEXT,
    "game_of_life_halting": Scorer.SAME,
    "gsm_symbolic": Scorer.SAME,
    "letter_jumble": Scorer.SAME,
    "polynomial_equations": Scorer.SAME,
    "spell_backward": Scorer.SAME,
    "time_intervals": Scorer.SAME,
}
"""Generators whose own scorer is not asked, or behind a grammar alone, and what is done in its place."""


def scorer_of(generator: str, *, one_answer: bool) -> Scorer:
    """How a generator's answers are scored; `one_answer` where the library itself knows but one right answer."""
    return OURS.get(generator, Scorer.SAME if one_answer else Scorer.GYM)


MAX_CHARACTERS = 10_000
"""A longer answer is not read."""
NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)(?![a-z])", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z]+")
PUZZLE_24 = 24
"""The target of puzzle24, which its entries do not say."""
FUNCTIONS = ("pi", "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan")
NAMES = frozenset((*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMPRTUVWXYZ", *FUNCTIONS))
"""What an expression may name; N, O, Q and S are functions of sympy's."""
PART = re.compile(r"\s+|\d{1,9}(?:\.\d{1,9})?(?![\w.])|\*\*|[-+*/(),]|([A-Za-z]+)(?![\w.])", re.ASCII)
MAX_EXPRESSION = 1000


def final_text(text: str, *, cut_off: bool) -> str | None:
    r"""The answer behind the thinking: the last `<answer>…</answer>`, else the last `\boxed{…}`, else all there is."""
    text = text[text.rfind(END_THINK) + len(END_THINK) :] if END_THINK in text else text
    text = text.partition(THINK)[0]
    end = text.rfind(END_ANSWER)
    start = text.rfind(ANSWER, 0, end) if end >= 0 else -1
    if start >= 0:
        return text[start + len(ANSWER) : end].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    return None if cut_off else text.strip() or None


def same_answer(answer: str, gold: str) -> bool:
    """Whether an answer is the row's own: the same text but for blanks, or the same exact number.

    Letter case does not count in a single word.
    """
    given, expected = unspaced(answer), unspaced(gold)
    if given == expected:
        return True
    if WORD.fullmatch(expected):
        return given.casefold() == expected.casefold()
    value = exact(expected)
    return value is not None and (found := exact(given)) is not None and value.same(found)


def same_text(answer: str, gold: str) -> bool:
    r"""Whether an answer is the gold text, but for blanks, signs of mathematics around it, and `\dfrac`."""
    return plain_formula(answer) == plain_formula(gold)


def plain_formula(text: str) -> str:
    return unspaced(text.replace("$", "").replace("\\dfrac", "\\frac"))


def is_no_number(answer: str, gold: str | None) -> bool:
    """Whether an answer says nan or infinity where the gold answer does not: no distance to those is meaningful."""
    return NO_NUMBER.search(answer) is not None and NO_NUMBER.search(gold or "") is None


def unspaced(text: str) -> str:
    """A text with single blanks, stripped lines, and no empty lines around it."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def is_listed(answer: str, entry: Mapping[str, Any]) -> bool:
    return unspaced(answer) in {unspaced(str(each)) for each in entry["metadata"]["valid_answers"]}


def makes_target(answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether an answer is arithmetic over the problem's numbers, each once, that makes its target."""
    numbers: Sequence[int] = entry["metadata"]["numbers"]
    target = entry["metadata"].get("target", PUZZLE_24)
    tokens = arithmetic.postfix(answer)
    if tokens is None or sorted(arithmetic.literals(tokens)) != sorted(map(str, numbers)):
        return False
    value = arithmetic.value(tokens)
    return value is not None and value[0] == target * value[1]


def is_expression(answer: str) -> bool:
    """Whether a text is arithmetic over numbers, letters and known functions: what may be handed to an evaluator.

    No name with a dot, an underscore or a bracket, no text in quotes: nothing that Python could look up or call.
    """
    if len(answer) > MAX_EXPRESSION:
        return False
    at = 0
    while at < len(answer):
        part = PART.match(answer, at)
        if part is None or (part[1] is not None and part[1] not in NAMES):
            return False
        at = part.end()
    return bool(answer.strip())
