r"""Rewards for mathematical answers: exact where possible, and never by evaluating what a model wrote.

**What is read.**  After the last `</think>` and before a `<think>` that is not closed: the last balanced `\boxed{…}`,
else the last closed `<answer>…</answer>`, else the last number, unless the length limit cut the completion off or the
number is part of something else (posttrain.rewards.parsing.tags).  `x = 5` with a single letter is read as 5,
also if the gold answer has no letter; if that is `y = 5` it is wrong.

**How it is compared.**  Numbers, and tuples, sets, lists and intervals of numbers, as fractions, also with a unit
(posttrain.rewards.parsing.exact_numbers).  Names (`cat`) and several numbers with units (`5 feet 3 inches`) as text
(posttrain.rewards.exact_match).  The rest goes to math-verify (the extra `math`) inside the sandbox, where a process
that does not end is killed; decimals are sent as fractions, and what it finds equal at 15 digits must agree in 50.

**What earns what.**  CORRECT is worth 1, all else 0.  A row whose gold answer cannot be read is not scored.

**Known hacks, and what stops them.**  math-verify skips what it cannot read, so a relation (`9 = 5`), a second answer,
an unlisted word, `\phantom` or a zero-width space hides the text next to it: rejected here, in linear time.  Towers of
powers and factorials that never end: rejected, and killed if they get through.  `100\%` for 100: a percent is a
hundredth.  Answers inside the thinking, a number cut off where it is right: not read.  Not stopped: an answer that is
guessed, or known from the data; in prose, unlisted words that change a number.

**What is missed.**  math-verify takes i for a letter, keeps the sides of an equation apart, and does not read `√2`,
`5²` or `½`; digits in groups between spaces (`1 000`) are not read.  tests/attacks/maths.jsonl has every known miss.
"""

import importlib.util
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from posttrain.errors import UserError
from posttrain.rewards import exact_match
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, answered_together, sandbox_answers
from posttrain.rewards.grading.answers import CUT_OFF, Column, Graded, Texts
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, SessionReward
from posttrain.rewards.parsing import exact_numbers
from posttrain.rewards.parsing.tags import AS_HYPHEN, answer_in
from posttrain.sandbox import inside
from posttrain.sandbox.execution import FEW, Sandbox, ServerOptions
from posttrain.sandbox.sandboxes import Sandboxes, site_packages

RELATION = re.compile(r"=|<|>|[≈≅≡]|\\(?:leq?|geq?|neq?|approx|approxeq|sim|equiv|in|lt|gt|[bp]?mod)(?![a-zA-Z])")
LETTER = r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|phi|varphi|omega))"
ASSIGNED = re.compile(rf"\s*{LETTER}(?:_(?:\w|\{{\w+\}}))?\s*=(?!=)", re.ASCII)
"""A letter that gets a value; not `\\pi` or `\\infty`, which have one."""
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
"""A number after a LaTeX space: another answer, or one that is not read."""
TRANSPOSED = re.compile(r"\^\s*\{?\s*(?:T|\\(?:top|intercal|dagger)(?![a-zA-Z])|\*)")
INVISIBLE = re.compile(
    r"\\(?:[hv]?phantom|smash|[hv]space)(?![a-zA-Z])|[\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\u00ad]"
)
"""Text that is invisible, or appears elsewhere."""
ONLY_WITH_GOLD = (SEVERAL, ELLIPSIS, BOX, BIG_NUMBER, NUMBERED_UNIT, PRIME, APART, TRANSPOSED, INVISIBLE)
"""Rejected in an answer unless the gold answer has one too."""
MAX_DEPTH = 12
"""Nested brackets; math-verify's time grows steeply with them."""
DIGIT_GROUP = re.compile(r"(?<=\d)(?:\{,\}|,(?=\d{3}(?!\d)))")
FUNCTION_IN_WORDS = re.compile(
    r"\\(?:mathrm|operatorname|textrm)\*?\s*\{\s*(?:([ei])|((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|max|min|gcd))\s*\}"
)
KNOWN_SIGNS = set("°×·÷∞∪∩∈∅ℝ√²³¹½¼¾≤≥")
"""Non-ASCII characters that math-verify reads, or reports as unread; so it does Greek letters."""
LAST_LETTERS = re.compile(r"[\d)}\]!]\s*([a-zA-Z]+(?:[ .]+[a-zA-Z]+)*)\s*\.?\s*$", re.ASCII)
BARE_UNIT = re.compile(r"\s*-?[\d.,]+(?:\s+([a-zA-Z]+)|([a-zA-Z]{2,}))\s*\.?\s*", re.ASCII)
BEHIND_WORDS = re.compile(r"(?:\s|\\[,;:! ]|[.}]|\^\s*\{?\s*(?:\d|\\circ)\s*\}?)*")
COMMAND = re.compile(r"\\(?:begin|end|mathbb|mathcal)\s*\{\w*\}|\\[a-zA-Z]+", re.ASCII)
OPERAND = re.compile(r"\s*(?:\d+|\\[a-zA-Z]+|[^\s({\[])")
DECIMAL_POINT = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?!\d|\.\d)", re.ASCII)


def is_refused(answer: str, gold: str) -> bool:
    """Whether an answer has something of these that the gold answer lacks."""
    # a character that math-verify may skip, with the text after it: `5 ≃ 6`
    strange = {character for character in answer if not character.isascii() and not "Ͱ" <= character <= "Ͽ"}
    given = exact_numbers.measured_value(answer)
    return (
        len(RELATION.findall(answer)) > max(len(RELATION.findall(gold)), 1 if ASSIGNED.match(answer) else 0)
        or ("$" in answer and "$" not in gold)  # where math-verify stops reading
        or ("," in DIGIT_GROUP.sub("", answer) and "," not in DIGIT_GROUP.sub("", gold))
        or bool(SET.search(answer)) != bool(SET.search(gold))
        or any(sign.search(answer) and not sign.search(gold) for sign in ONLY_WITH_GOLD)
        or not strange <= KNOWN_SIGNS | set(gold)
        or stripped(answer, gold)
        or (
            given is not None and given.has_another_number and exact_numbers.gold_value(gold) is not None
        )  # `5 feet 3 inches`
        or not subscripts(answer) <= subscripts(gold)
        or tower(answer) > max(1, tower(gold))
        or depth(answer) > max(MAX_DEPTH, depth(gold))
        or other_words(answer, gold)
    )


def subscripts(text: str) -> set[str]:
    return {found.strip("{} ") for found in SUBSCRIPT.findall(text)}


def without_dollars(text: str) -> str:
    text = text.replace("\\$", "").strip()
    return text.strip("$") if text[:1] == text[-1:] == "$" else text


def stripped(answer: str, gold: str) -> bool:
    """Whether an answer ends in letters that math-verify mistakes for a unit: `5 more`, `5T`."""
    found = LAST_LETTERS.search(exact_numbers.WORDS.sub(" ", answer))
    if found is None or letters(gold) or found[1] in ("e", "i"):
        return False
    return exact_numbers.unit_of(found[1]) is None


def other_words(answer: str, gold: str) -> bool:
    r"""Whether an answer has words it may not have: math-verify skips units, and all that follows them.

    If both have words, they must be the same.  If the gold answer has none, they must be a listed unit, with nothing
    after it but a power: `5 \text{ cm}^2`.  A gold answer's words may be omitted if they are its unit.
    """
    said, wanted = words_in(answer), words_in(gold)
    if not said:
        return any(exact_numbers.NO_UNIT.search(word) for word in wanted)
    if wanted:
        return said != wanted
    if any(exact_numbers.unit_of(word) is None for word in exact_numbers.WORDS.findall(answer)) or (
        (bare := BARE_UNIT.fullmatch(answer)) and exact_numbers.unit_of(bare[1] or bare[2]) is None
    ):
        return True
    first = exact_numbers.WORDS.search(answer)
    if first is None or exact_numbers.WORDS.fullmatch(answer.strip()):
        return False
    return BEHIND_WORDS.fullmatch(exact_numbers.WORDS.sub("", answer[first.end() :])) is None


def words_in(text: str) -> set[str]:
    """The words set as text, and a unit at the end, without plurals and brackets."""
    unit = BARE_UNIT.fullmatch(text)
    found = exact_numbers.WORDS.findall(text) + ([unit[1] or unit[2]] if unit else [])
    plain = (word.strip(" .()").casefold() for word in found)
    return {word.removesuffix("s") or word for word in plain if word}


def other_letters(answer: str, gold: str) -> bool:
    known, given = letters(gold), letters(answer)
    if exact_numbers.COEFFICIENT.search(gold) and not known <= given:
        return True  # it would take `3m` for 3 metres
    return bool(known or not re.search(r"\d", gold)) and not given <= known | {"e", "i"}


def letters(text: str) -> set[str]:
    plain = COMMAND.sub(" ", exact_numbers.WORDS.sub(" ", text)).rpartition("=")[2]
    return {character for character in plain if character.isascii() and character.isalpha()}


def tower(text: str) -> int:
    """How many powers are stacked: 1 for `x^2 y^3`, 2 for `e^{x^2}`."""
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
    now, most = 0, 0
    for character in text:
        now += (character in "([{") - (character in ")]}")
        most = max(most, now)
    return most


def as_asked(text: str) -> str:
    r"""An answer as math-verify gets it: `0.25` as `\frac{25}{100}`, degrees in its notation."""
    text = re.sub(r"\^?\\degree(?![a-zA-Z])|°", r"^\\circ", text)

    def as_fraction(decimal: "re.Match[str]") -> str:  # as text: long integers are slow
        digits = (decimal[1] + decimal[2]).lstrip("0") or "0"
        return rf"\frac{{{digits}}}{{1{'0' * len(decimal[2])}}}"

    return DECIMAL_POINT.sub(as_fraction, text)


SOURCE = "from prepared import compare_answers"
PREPARE = Path(inside.__file__).with_name("math_check.py")


class Question(NamedTuple):
    """Whether an answer equals the gold one."""

    gold: str
    answer: str


def compare_symbolically(questions: Sequence[Question], sandboxes: Sandboxes, *, cpu_seconds: float) -> list[object]:
    """`same`, `different`, `unreadable`, `no_gold` or Unanswered; each different question is asked once."""
    different = list(dict.fromkeys(questions))
    function = SandboxFunction("compare_answers", SOURCE)
    said = sandbox_answers(sandbox_with_maths(sandboxes), function, different, cpu_seconds=cpu_seconds)
    results = dict(zip(different, said, strict=True))
    return [results[question] for question in questions]


def sandbox_with_maths(sandboxes: Sandboxes) -> Sandbox:
    require_math_verify()
    prepare = PREPARE.read_text(encoding="utf-8")
    return sandboxes.started_with(ServerOptions(modules=FEW, path=site_packages(), prepare=prepare))


def require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "reward maths: answers that are not plain numbers need math-verify, which is not installed.\n"
            "    Run `pip install posttrain[math]`, or set the reward's option symbolic: false to ignore such answers."
        )


@dataclass(frozen=True, kw_only=True)
class MathsReward(SessionReward):
    """Reward function: 1 for an answer equal to the column `answer` (or `ground_truth`)."""

    symbolic: bool = True
    """Use math-verify for answers that are not numbers; without it they are unreadable, and such rows not scored."""
    cpu_seconds: float = 3.0
    """Processor time for one of its answers."""
    rows_stand_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.symbolic:  # now, not at the first answer that is not a number, perhaps in step 500
            require_math_verify()

    def scores(
        self,
        resources: Resources,
        /,
        *,
        completions: Texts,
        finish_reasons: Texts,
        answer: Column | None = None,
        ground_truth: Column | None = None,
        **_columns: object,
    ) -> list[Graded | ScoringFailure]:
        given = answer if answer is not None else ground_truth
        golds = [exact_match.gold_answer(None if given is None else given[row]) for row in range(len(completions))]
        rows = list(zip(completions, finish_reasons, (gold.text for gold in golds), strict=True))
        first = [quickly(text, finish in CUT_OFF, gold) for text, finish, gold in rows]

        def compared(questions: list[Question]) -> list[Graded | ScoringFailure]:
            if self.symbolic:
                said = compare_symbolically(questions, resources.sandboxes, cpu_seconds=self.cpu_seconds)
            else:
                known = (assigned(question.gold) for question in questions)
                readable = [
                    exact_numbers.gold_value(gold) is not None or exact_match.gold_name(gold) is not None
                    for gold in known
                ]
                said = ["unreadable" if each else "no_gold" for each in readable]
            return [slowly(*each) for each in zip(said, questions, strict=True)]

        graded, named = answered_together(first, Question, compared), resources.memory(self, set[str])
        for verdict, gold in zip(graded, golds, strict=True):
            if isinstance(verdict, Graded) and verdict.outcome is exact_match.AnswerOutcome.NO_GOLD:
                problem = gold.problem or (f"{gold.text[:200]!r} cannot be read" if gold.text else "")
                if problem and problem not in named:
                    named.add(problem)
                    rule = "`answer` must be only the final answer: a number, a LaTeX expression or a name."
                    warnings.warn(f"reward maths: the gold answer {problem}; not scored. {rule}", stacklevel=2)
        return graded


def assigned(answer: str) -> str:
    """The right side of `x = 5`, or the whole answer."""
    found = ASSIGNED.match(answer)
    return answer[found.end() :] if found and answer.count("=") == 1 else answer


def quickly(text: str, cut_off: bool, gold: str | None) -> Graded | Question:
    """The verdict if exact numbers decide it, or the question for math-verify."""
    if gold is None:
        return Graded(None, exact_match.AnswerOutcome.NO_GOLD)
    found = answer_in(text, cut_off=cut_off)
    if found is None or not found.strip():
        return exact_match.missing_answer(cut_off)
    if len(found) > exact_numbers.MAX_CHARACTERS:
        return Graded(0.0, exact_match.AnswerOutcome.REFUSED)
    found, gold = found.translate(AS_HYPHEN), gold.translate(AS_HYPHEN)
    names = {re.sub(r"[\s{}]", "", text.partition("=")[0]) for text in (found, gold) if ASSIGNED.match(text)}
    if len(names) > 1:  # a value for another letter
        return exact_match.graded_answer(False)
    expected, given = exact_numbers.gold_value(assigned(gold)), exact_numbers.measured_value(assigned(found))
    if expected is not None:
        same = None if given is None else expected.same(given)
    else:
        same = exact_match.same_name(assigned(found), assigned(gold))
    if same is not None:
        return exact_match.graded_answer(same)
    found, gold = (
        FUNCTION_IN_WORDS.sub(lambda word: word[1] or f"\\{word[2]} ", without_dollars(text)) for text in (found, gold)
    )
    if is_refused(found, gold):
        return Graded(0.0, exact_match.AnswerOutcome.REFUSED)
    if other_letters(found, gold):
        return exact_match.graded_answer(False)
    return Question(as_asked(gold), as_asked(assigned(found)))


def slowly(said: object, question: Question) -> Graded | ScoringFailure:
    """The verdict, from the sandbox's answer to a question."""
    match said:
        case "same" | "different":
            return exact_match.graded_answer(said == "same")
        case "no_gold":
            return Graded(None, exact_match.AnswerOutcome.NO_GOLD)
        case Unanswered.LOST:
            return ScoringFailure(f"the sandbox lost the comparison with {question.gold!r}")
    late = said is Unanswered.TIME_LIMIT
    return Graded(0.0, exact_match.AnswerOutcome.TIME_LIMIT if late else exact_match.AnswerOutcome.UNREADABLE)
