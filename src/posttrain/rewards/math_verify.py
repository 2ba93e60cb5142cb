r"""What math-verify is never asked, as it would take it for right or never come back; and how it is asked the rest.

It reads what it can of a text and passes over the rest, so a relation, a second answer or a dollar sign that it does
not know hides what is next to it.  It compares decimals to six places, so they are put to it as fractions.  All of
this takes time in proportion to the text.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from posttrain.errors import UserError
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, answers
from posttrain.rewards.parsing.units import COEFFICIENT, NO_UNIT, WORDS, gold_value, measured_value, unit_of
from posttrain.sandbox import inside
from posttrain.sandbox.execution import FEW, Sandbox, ServerOptions
from posttrain.sandbox.sandboxes import Sandboxes, site_packages

RELATION = re.compile(r"=|<|>|[≈≅≡]|\\(?:leq?|geq?|neq?|approx|approxeq|sim|equiv|in|lt|gt|[bp]?mod)(?![a-zA-Z])")
LETTER = r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|phi|varphi|omega))"
ASSIGNED = re.compile(rf"\s*{LETTER}(?:_(?:\w|\{{\w+\}}))?\s*=(?!=)", re.ASCII)
"""A letter that is given a value; not `\\pi` or `\\infty`, which have one."""
SEVERAL = re.compile(r"\\(?:lor|vee|pm)(?![a-zA-Z])|\b(?:or|and|not|vs)\b")
SET = re.compile(r"\\\{|\\lbrace")
ELLIPSIS = re.compile(r"\\[lcdv]?dots|\.\.\.|…")
BOX = re.compile(r"\\f?box")
BIG_NUMBER = re.compile(
    r"\^\s*\{?\s*-?\d{4,}|\*\*\s*-?\d{4,}|\d{4,}\s*\}?\s*!|!\s*!|\([^a-zA-Z()]*[!^][^a-zA-Z()]*\)\s*!"
)
NUMBERED_UNIT = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{1,3}\s+\d+\s*$", re.ASCII)
SUBSCRIPT = re.compile(r"[\d)\]}]\s*_\s*(\w|\{[^{}]*\})")
PRIME = re.compile(r"[\w)\]}]\s*(?:['’′″]|\^\s*\{?\s*\\prime)")
APART = re.compile(r"(?:~|(?<!\\)\\(?:[,;:! ]|q?quad(?![a-zA-Z])))\s*\d")
"""A number behind a space that LaTeX sets: another answer, or nothing that is read."""
TRANSPOSED = re.compile(r"\^\s*\{?\s*(?:T|\\(?:top|intercal|dagger)(?![a-zA-Z])|\*)")
INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|smash|[hv]space)(?![a-zA-Z])|[\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\u00ad]"
)
"""What is invisible, or appears elsewhere."""
ONLY_WITH_GOLD = (SEVERAL, ELLIPSIS, BOX, BIG_NUMBER, NUMBERED_UNIT, PRIME, APART, TRANSPOSED, INVISIBLE)
"""What is refused in an answer unless the gold answer has such a thing too."""
MAX_DEPTH = 12
"""Brackets within each other; math-verify's time grows steeply with them."""
DIGIT_GROUP = re.compile(r"(?<=\d)(?:\{,\}|,(?=\d{3}(?!\d)))")
FUNCTION_IN_WORDS = re.compile(
    r"\\(?:mathrm|operatorname|textrm)\*?\s*\{\s*(?:([ei])|((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|max|min|gcd))\s*\}"
)
KNOWN_SIGNS = set("°×·÷∞∪∩∈∅ℝ√²³¹½¼¾≤≥")
"""Characters beyond ASCII that math-verify reads, or does not read and says so; so with Greek letters."""
LAST_LETTERS = re.compile(r"[\d)}\]!]\s*([a-zA-Z]+(?:[ .]+[a-zA-Z]+)*)\s*\.?\s*$", re.ASCII)
BARE_UNIT = re.compile(r"\s*-?[\d.,]+(?:\s+([a-zA-Z]+)|([a-zA-Z]{2,}))\s*\.?\s*", re.ASCII)
BEHIND_WORDS = re.compile(r"(?:\s|\\[,;:! ]|[.}]|\^\s*\{?\s*(?:\d|\\circ)\s*\}?)*")
COMMAND = re.compile(r"\\(?:begin|end|mathbb|mathcal)\s*\{\w*\}|\\[a-zA-Z]+", re.ASCII)
OPERAND = re.compile(r"\s*(?:\d+|\\[a-zA-Z]+|[^\s({\[])")
DECIMAL_POINT = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?!\d|\.\d)", re.ASCII)


def is_refused(answer: str, gold: str) -> bool:
    """Whether an answer is one of these and the gold answer is not."""
    relations, own = len(RELATION.findall(answer)), len(RELATION.findall(gold))
    if relations > max(own, 1 if ASSIGNED.match(answer) else 0):
        return True
    if "$" in answer and "$" not in gold:  # its reader stops there
        return True
    if has_comma(answer) > has_comma(gold) or bool(SET.search(answer)) != bool(SET.search(gold)):
        return True
    if any(sign.search(answer) and not sign.search(gold) for sign in ONLY_WITH_GOLD):
        return True
    if other_signs(answer, gold) or stripped(answer, gold) or other_numbers(answer, gold):
        return True
    if not subscripts(answer) <= subscripts(gold):
        return True
    too_high = tower(answer) > max(1, tower(gold)) or depth(answer) > max(MAX_DEPTH, depth(gold))
    return too_high or other_words(answer, gold)


def other_name(answer: str, gold: str) -> bool:
    """Whether both give a value to a letter, but to different ones."""
    given, wanted = ASSIGNED.match(answer), ASSIGNED.match(gold)
    return bool(given and wanted) and plain_name(answer) != plain_name(gold)


def plain_name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text.partition("=")[0])


def subscripts(text: str) -> set[str]:
    """Subscripts of numbers and brackets: the base of `101_2`."""
    return {found.strip("{} ") for found in SUBSCRIPT.findall(text)}


def with_functions(text: str) -> str:
    return FUNCTION_IN_WORDS.sub(lambda found: found[1] or f"\\{found[2]} ", text)


def without_dollars(text: str) -> str:
    text = text.replace("\\$", "").strip()
    return text.strip("$") if text[:1] == text[-1:] == "$" else text


def has_comma(text: str) -> bool:
    return "," in DIGIT_GROUP.sub("", text)


def other_signs(answer: str, gold: str) -> bool:
    """Whether an answer has a character that math-verify may skip with all that follows it: `5 ≃ 6`."""
    strange = {character for character in answer if not character.isascii() and not "Ͱ" <= character <= "Ͽ"}
    return not strange <= KNOWN_SIGNS | set(gold)


def other_numbers(answer: str, gold: str) -> bool:
    """Whether an answer continues with another number after a unit, where the gold answer is one: `5 feet 3 inches`."""
    given = measured_value(answer)
    return given is not None and given.has_another_number and gold_value(gold) is not None


def stripped(answer: str, gold: str) -> bool:
    """Whether an answer ends in letters that math-verify takes for a unit and are none: `5 more`, `5T`."""
    found = LAST_LETTERS.search(WORDS.sub(" ", answer))
    if found is None or letters(gold) or found[1] in ("e", "i"):
        return False
    return unit_of(found[1]) is None


def other_words(answer: str, gold: str) -> bool:
    r"""Whether an answer's words are not what they may be: math-verify leaves out units, and all that follows them.

    Words that both have must be the same.  Beside a gold answer without any they must be a unit of the list, and have
    nothing behind them but a power: `5 \text{ cm}^2`.  A gold answer's words may be left out where they are its unit.
    """
    said, wanted = words_in(answer), words_in(gold)
    if not said:
        return any(NO_UNIT.search(word) for word in wanted)
    if wanted:
        return said != wanted
    if any(unit_of(word) is None for word in WORDS.findall(answer)) or (
        (bare := BARE_UNIT.fullmatch(answer)) and unit_of(bare[1] or bare[2]) is None
    ):
        return True
    first = WORDS.search(answer)
    if first is None or WORDS.fullmatch(answer.strip()):
        return False
    return BEHIND_WORDS.fullmatch(WORDS.sub("", answer[first.end() :])) is None


def words_in(text: str) -> set[str]:
    """The words that a text sets as text, and a unit at its end, without plurals and brackets."""
    unit = BARE_UNIT.fullmatch(text)
    found = WORDS.findall(text) + ([unit[1] or unit[2]] if unit else [])
    plain = (word.strip(" .()").casefold() for word in found)
    return {word.removesuffix("s") or word for word in plain if word}


def other_letters(answer: str, gold: str) -> bool:
    """Whether an answer has a variable that the gold answer lacks, which math-verify may take for a unit."""
    own = letters(gold)
    if COEFFICIENT.search(gold) and not own <= letters(answer):
        return True  # it would take `3m` for 3 metres
    return bool(own or not re.search(r"\d", gold)) and not letters(answer) <= own | {"e", "i"}


def letters(text: str) -> set[str]:
    plain = COMMAND.sub(" ", WORDS.sub(" ", text)).rpartition("=")[2]
    return {character for character in plain if character.isascii() and character.isalpha()}


def tower(text: str) -> int:
    """How many powers stand on each other: 1 for `x^2 y^3`, 2 for `e^{x^2}`."""
    height, highest, at = 0, 0, 0
    groups: list[int] = []  # the height outside of each open bracket
    operand_end, operand_height = -1, 0
    while at < len(text):
        if text[at] == "^" or text.startswith("**", at):
            power = (operand_height if at == operand_end else height) + 1
            highest = max(highest, power)
            at += 1 if text[at] == "^" else 2
            operand = OPERAND.match(text, at)
            if operand is not None and operand[0].strip() != "\\left":
                at = operand_end = operand.end()
                operand_height = power
                continue
            bracket = next((i for i in range(at, len(text)) if text[i] in "({["), len(text))
            groups.append(height)
            height, at = power, bracket + 1
            continue
        if text[at] in "({[":
            groups.append(height)
        elif text[at] in ")}]" and groups:
            height = groups.pop()
        at += 1
    return highest


def depth(text: str) -> int:
    """How many brackets of any kind are open at once."""
    now, most = 0, 0
    for character in text:
        now += (character in "([{") - (character in ")]}")
        most = max(most, now)
    return most


def as_asked(text: str) -> str:
    r"""An answer as it is put to math-verify: `0.25` as `\frac{25}{100}`, degrees in its own way."""
    text = re.sub(r"\^?\\degree(?![a-zA-Z])|°", r"^\\circ", text)
    return DECIMAL_POINT.sub(as_fraction, text)


def as_fraction(decimal: "re.Match[str]") -> str:
    r"""`0.25` as `\frac{25}{100}`; as text, for integers of many digits take their time."""
    digits = (decimal[1] + decimal[2]).lstrip("0") or "0"
    return rf"\frac{{{digits}}}{{1{'0' * len(decimal[2])}}}"


SOURCE = "from prepared import compare_answers"
PREPARE = Path(inside.__file__).with_name("math_check.py")


class ComparisonResult(StrEnum):
    """The result of a comparison."""

    SAME = "same"
    DIFFERENT = "different"
    UNREADABLE = "unreadable"
    NO_GOLD = "no_gold"
    TIME_LIMIT = "time_limit"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Question:
    """Whether an answer says the same as the gold one."""

    gold: str
    answer: str


def compare_symbolically(
    questions: Sequence[Question], sandboxes: Sandboxes, *, cpu_seconds: float
) -> list[ComparisonResult]:
    """An answer for every question, each asked once."""
    different = list(dict.fromkeys(questions))
    asked = [(question.gold, question.answer) for question in different]
    said = answers(
        sandbox_with_maths(sandboxes), SandboxFunction("compare_answers", SOURCE), asked, cpu_seconds=cpu_seconds
    )
    results = dict(zip(different, map(as_result, said), strict=True))
    return [results[question] for question in questions]


def as_result(said: object) -> ComparisonResult:
    """The result in a reply, or in the lack of one."""
    if said is Unanswered.LOST:
        return ComparisonResult.LOST
    if said is Unanswered.TIME_LIMIT:
        return ComparisonResult.TIME_LIMIT
    if isinstance(said, Unanswered) or not isinstance(said, str):
        return ComparisonResult.UNREADABLE
    return ComparisonResult(said)


def sandbox_with_maths(sandboxes: Sandboxes) -> Sandbox:
    """The sealed one with math-verify imported and warmed up."""
    require_math_verify()
    prepare = PREPARE.read_text(encoding="utf-8")
    return sandboxes.started_with(ServerOptions(modules=FEW, path=site_packages(), prepare=prepare))


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "reward maths: answers that are no plain numbers need math-verify, which is not installed.\n"
            "    `pip install posttrain[math]`, or set the reward's option symbolic: false to leave such answers out."
        )
