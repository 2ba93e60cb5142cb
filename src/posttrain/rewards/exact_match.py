r"""Gold answers of rows, and answers compared with them as text, number or arithmetic, without evaluating anything.

**Gold answers** are text, or numbers written in digits (`1e-05` is 0.00001, not Euler's e minus 5); of a text with a
box only its content counts.  docs/rewards.md has a table of what else a column may hold: a mistake in it is never a
wrong answer, but not scored and reported.  `\text{Monday}`, `Paris`, `ABC` and several numbers with units (`1 hour 30
minutes`) are names, compared as text: math-verify reads letters as a product, in which `act` equals `cat`.

**`exact_match`** reads what follows the last `</think>`: the last closed `<answer>…</answer>`, else the last box, else
everything.  It pays 1 for the gold text apart from blanks (and letter case, for a single word), or exactly its number.
A gold capital letter is a choice, also written `(B)`, `B.` or `B)`.  Known hack: guessing among few choices.

**Generated problems.**  reasoning-gym's scorers evaluate some answers as Python, pay for an answer that the text merely
contains, and accept any four numbers for those of a puzzle.  So what can be compared here is compared here; problems
with many right answers go to its scorer, only inside the sandbox, and only after a grammar check if it evaluates them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from functools import lru_cache
from numbers import Integral, Rational, Real
from typing import Any, NamedTuple

from posttrain.rewards.grading.answers import Array, Column, Graded, Texts
from posttrain.rewards.parsing import arithmetic, exact_numbers
from posttrain.rewards.parsing.tags import after_thinking, last_answer, last_boxed

SCIENTIFIC = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,6}", re.ASCII)
"""Floats as programs write them; Euler's e appears as in `2 e - 5` or `2e^5`."""
NOT_PROSE = re.compile(
    r"\\(?:text\w*|math\w+|mbox|begin|end|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+"
    r"|\b(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|lim|max|min|gcd|lcm|mod|sqrt|or|and)\b",
    re.ASCII,
)
PHRASE = re.compile(r"(?<![\w^])[a-zA-Z]+(?:[ ,.:]+[a-zA-Z]+)*(?![\w(^])", re.ASCII)
NUMBER_END = re.compile(r"[\d)}]\s*\Z")


class AnswerOutcome(StrEnum):
    """How an answer to a row with a gold answer fared."""

    CORRECT = "correct"
    WRONG = "wrong"
    PARTIAL = "partial"
    """A generator's scorer gives less than full score; paid only with `partial_credit`."""
    REFUSED = "refused"
    """Not compared: too long, a chain, a list, a power, nan or the like."""
    UNREADABLE = "unreadable"
    """No way of reading understands it, or a generator's scorer raised."""
    TIME_LIMIT = "time_limit"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    """No answer, and the length limit cut the completion off."""
    NO_GOLD = "no_gold"
    """The row has no answer, or one that cannot be read: not scored."""


def graded_answer(right: bool) -> Graded:
    return Graded(1.0, AnswerOutcome.CORRECT) if right else Graded(0.0, AnswerOutcome.WRONG)


def missing_answer(cut_off: bool) -> Graded:
    return Graded(0.0, AnswerOutcome.TRUNCATED if cut_off else AnswerOutcome.NO_ANSWER)


class GoldAnswer(NamedTuple):
    """A row's answer, or why it has no answer."""

    text: str | None
    problem: str = ""
    """What is wrong; empty if the row simply has no answer."""


MISSING = GoldAnswer(None)


def gold_answer(value: object) -> GoldAnswer:
    """The answer in one entry of the column."""
    if isinstance(value, str):
        return gold_text(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # of pandas, which may be missing
        return MISSING
    if isinstance(value, bool):
        return GoldAnswer(str(value))
    if isinstance(value, Rational) and not isinstance(value, Integral):
        return GoldAnswer(f"{value.numerator}/{value.denominator}")
    if isinstance(value, Real | Decimal):
        return gold_number(Decimal(int(value)) if isinstance(value, Integral) else Decimal(str(value)))
    if isinstance(value, Array) and math.prod(value.shape) == 1:
        return gold_answer(value.item())
    return GoldAnswer(None, f"{value!r:.200} is a {type(value).__name__}, neither text nor a number")


def gold_number(number: Decimal) -> GoldAnswer:
    if number.is_nan():
        return MISSING
    if number.is_infinite():
        return GoldAnswer(None, f"{number} cannot be compared with an answer")
    if abs(number.adjusted()) > exact_numbers.MAX_DIGITS or len(text := format(number, "f")) > exact_numbers.MAX_DIGITS:
        return GoldAnswer(None, f"{number:.3e} has more than {exact_numbers.MAX_DIGITS} digits")
    return GoldAnswer(text)


@lru_cache(maxsize=4096)
def gold_text(text: str) -> GoldAnswer:
    """The answer in a text."""
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip()
    if text.casefold() in ("", "nan", "<na>", "nat"):
        return MISSING
    if text.casefold() in ("n/a", "#n/a", "none", "null"):  # exports write them for missing; `\\text{None}` means it
        return GoldAnswer(None, f"{text!r} means no answer")
    if SCIENTIFIC.fullmatch(text):
        return gold_number(Decimal(text))
    if is_prose(text):
        return GoldAnswer(None, f"{text[:200]!r} is a sentence")
    return GoldAnswer(text)


def is_prose(text: str) -> bool:
    """Whether there are words around a number that are neither its unit nor a function."""
    if "####" in text:  # some data sets put it between the solution and the answer
        return True
    whole = exact_numbers.WORDS.fullmatch(text)
    plain = NOT_PROSE.sub(" 0 ", whole[1] if whole else text)
    if not re.search(r"\d", whole[1] if whole else text) or exact_numbers.gold_value(text) is not None:
        return False
    return any(
        len(word) >= 4 or len(found[0].split()) > 1  # fewer adjacent letters may be a product
        for found in PHRASE.finditer(plain)
        if not NUMBER_END.search(plain, 0, found.start()) or exact_numbers.unit_of(found[0]) is None
        for word in re.findall("[a-zA-Z]{2,}", found[0])
    )


SET_NAME = re.compile(r"[^\d\\^_=<>+*/$|{}]*[^\W\d_][^\d\\^_=<>+*/$|{}]*")
BARE_NAME = re.compile(r"[^\W\d_]+(?:[ -][^\W\d_]+)*")
LONG_WORD = re.compile(r"[^\W\d_]{3,}|[A-Z]{2,}|^[A-Z]$|[^\W\d_a-zA-Z]{2,}")
LETTERS_ALONE = re.compile(r"(?:[^\W\d_]|[\s~.()]|\\[,;:! ])*")


@lru_cache(maxsize=4096)
def gold_name(gold: str) -> tuple[str, bool] | None:
    r"""A gold answer's name, and whether it is set as text; None if it is not a name.

    Three or more bare letters are a name, and so are capitals: `xy` is a product, `B` the second choice.
    """
    text = gold.strip().strip("$").strip()
    if exact_numbers.is_compound(text):
        return plain_name_of(text), True
    whole = exact_numbers.WORDS.fullmatch(text)
    if whole is not None:
        return (plain_name_of(text), True) if SET_NAME.fullmatch(whole[1]) else None
    if BARE_NAME.fullmatch(text) and ("-" not in text or len(text) > len("a-b-c")) and LONG_WORD.search(text):
        return plain_name_of(text), False
    return None


def plain_name_of(text: str) -> str:
    name = " ".join(exact_numbers.plain_words(text.strip().strip("$*").strip()).strip(" .()").split())
    return name.casefold() if len(name) > 1 else name


def same_name(answer: str, gold: str) -> bool | None:
    """Whether an answer is the gold answer's name; None if it has no name, or the answer may write it differently."""
    name = gold_name(gold)
    if name is None:
        whole = exact_numbers.WORDS.fullmatch(answer.strip())
        return True if whole and whole[1].strip() == gold.strip() else None
    said = plain_name_of(answer)
    if said == name[0] or name[1]:
        return said == name[0]
    if LETTERS_ALONE.fullmatch(answer.strip().strip("$*")) or exact_numbers.WORDS.fullmatch(answer.strip()):
        return said.replace(" ", "") == name[0].replace(" ", "")
    return None


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
    chosen = CHOSEN.fullmatch(found) if re.fullmatch("[A-Z]", gold) else None
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
    """reasoning-gym's scorer in the sandbox, after a grammar check: it evaluates expressions."""
    GYM = "gym"
    """reasoning-gym's scorer in the sandbox."""


OURS = {
    generator: scorer
    for scorer, generators in {
        # Those that evaluate what they score (`eval`, sympy's `parse_expr`), and those that pay in full for other texts
        # than the one right answer: any text if it is False, the answer twice or among others, one root of two
        # (benchmarks/gym_scoring.py).
        Scorer.ARITHMETIC: "countdown puzzle24",
        Scorer.LISTED: "n_queens",
        Scorer.TEXT: "fraction_simplification",
        Scorer.SAME: "string_insertion spiral_matrix binary_matrix number_sorting game_of_life_halting gsm_symbolic"
        " letter_jumble polynomial_equations spell_backward time_intervals",
        Scorer.EXPRESSION: "polynomial_multiplication simple_integration intermediate_integration",
    }.items()
    for generator in generators.split()
}
"""Generators whose scorer is not used, or only after a grammar check, and what replaces it."""


def scorer_of(generator: str, *, one_answer: bool) -> Scorer:
    """How a generator's answers are scored; `one_answer`: the library has only one right answer."""
    return OURS.get(generator, Scorer.SAME if one_answer else Scorer.GYM)


MAX_CHARACTERS = 10_000
"""A longer answer is not read."""
NO_NUMBER = re.compile(r"(?<![a-z])(?:nan|inf|infinity)(?![a-z])", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z]+")
FUNCTIONS = ("pi", "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan")
NAMES = {*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMPRTUVWXYZ", *FUNCTIONS}
"""Allowed names; N, O, Q and S are functions of sympy's."""
PART = re.compile(r"\s+|\d{1,9}(?:\.\d{1,9})?(?![\w.])|\*\*|[-+*/(),]|([A-Za-z]+)(?![\w.])", re.ASCII)


def final_text(text: str, *, cut_off: bool) -> str | None:
    r"""The answer after the thinking: the last `<answer>…</answer>`, else the last `\boxed{…}`, else everything."""
    text = after_thinking(text)
    found = last_answer(text)
    found = last_boxed(text) if found is None else found
    return found.strip() if found is not None else None if cut_off else text.strip() or None


def same_answer(answer: str, gold: str) -> bool:
    """Whether an answer has the same text apart from blanks (and case, for one word), or the same exact number."""
    given, expected = unspaced(answer), unspaced(gold)
    if given == expected:
        return True
    if WORD.fullmatch(expected):
        return given.casefold() == expected.casefold()
    value = exact_numbers.exact(expected)
    return value is not None and (found := exact_numbers.exact(given)) is not None and value.same(found)


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
