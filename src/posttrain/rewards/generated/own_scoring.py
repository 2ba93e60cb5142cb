"""Answers to generated problems, compared here as text, as numbers or as arithmetic; nothing is evaluated."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.rewards.countdown import arithmetic
from posttrain.rewards.maths.exact_numbers import exact
from posttrain.rewards.maths.final_answers import last_boxed
from posttrain.rewards.tags import ANSWER, END_ANSWER, END_THINK, THINK

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


def same(answer: str, gold: str) -> bool:
    """Whether an answer is the row's own: the same text but for blanks, or the same exact number.

    Of a single word letter case is no matter.
    """
    given, expected = unspaced(answer), unspaced(gold)
    if given == expected:
        return True
    if WORD.fullmatch(expected):
        return given.casefold() == expected.casefold()
    value = exact(expected)
    return value is not None and (found := exact(given)) is not None and value.same(found)


def same_text(answer: str, gold: str) -> bool:
    r"""Whether an answer is the row's own text, but for blanks, signs of mathematics around it, and `\dfrac`."""
    return bare(answer) == bare(gold)


def bare(text: str) -> str:
    """A formula without what only sets it."""
    return unspaced(text.replace("$", "").replace("\\dfrac", "\\frac"))


def is_no_number(answer: str, gold: str | None) -> bool:
    """Whether an answer says nan or infinity where the row's own does not: distances to those are no distances."""
    return NO_NUMBER.search(answer) is not None and NO_NUMBER.search(gold or "") is None


def unspaced(text: str) -> str:
    """A text with one blank where there are several, none at the ends of its lines, and no empty lines around it."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def listed(answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether an answer is one of those that the problem lists."""
    return unspaced(answer) in {unspaced(str(each)) for each in entry["metadata"]["valid_answers"]}


def makes_target(answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether arithmetic over all the problem's numbers, each once, comes to its target exactly."""
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
