r"""Rewards for mathematical answers: exact where possible, and never by evaluating what a model wrote.

**What is read.**  After the last `</think>` and before a `<think>` that is not closed, in this order: the last balanced
`\boxed{…}`; the last closed `<answer>…</answer>`; the last number, unless the length limit cut the completion off or
the number is part of something else (posttrain.rewards.parsing.final_answers).  `x = 5` with a single letter is read as
5, also if the gold answer has no letter; if that is `y = 5` it is wrong.  Every minus sign is a minus, and so are
`negative` and `minus`.  If the gold answer has no unit, an answer may have one of posttrain.rewards.parsing.units
(`5^\circ` too), but no percent sign, other word (`5 \text{ fifths}`), subscript (`5_3`) or prime (`5'`).

**How it is compared.**  Numbers, and tuples, sets, lists and intervals of numbers, as fractions
(posttrain.rewards.parsing.exact_numbers): microseconds, no tolerance.  Names (`cat`) and several numbers with units
(`5 feet 3 inches`) as text.  Everything else goes to math-verify (the extra `math`) inside the sandbox, where a process
that does not end is killed; decimals are sent as fractions, and what it finds equal at 15 digits must agree in 50.

**What earns what.**  CORRECT is worth 1, all else 0.  A row whose gold answer cannot be read
(posttrain.rewards.gold_answers) is not scored, and reported once.

**Known hacks, and what stops them.**  A false chain (`9 = 5`), several answers instead of one, words or letters that
math-verify mistakes for units, and whatever else hides an answer from it (`\phantom`, a zero-width space): rejected by
posttrain.rewards.math_verify.  Towers of powers and factorials that never end: rejected, and killed if they get
through.  `100\%` for 100: a percent is a hundredth.  Answers inside the thinking, a number cut off where it is right:
not read.  Text that is slow to read: linear time, bounded length.  Not stopped: an answer that is guessed, or known
from the data; in prose, unlisted words that change a number.

**What is missed.**  math-verify takes i for a letter, keeps the sides of an equation apart, and does not read `√2`,
`5²` or `½`; digits in groups between spaces (`1 000`) are not read, and unlisted units are rejected.
tests/attacks/maths.jsonl has every known miss.
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

from posttrain.rewards.code.function_questions import answered_together
from posttrain.rewards.gold_answers import (
    AnswerOutcome,
    gold_answers,
    gold_name,
    graded_answer,
    missing_answer,
    same_name,
)
from posttrain.rewards.grading.answers import Column, Graded, Texts
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, SessionReward
from posttrain.rewards.math_verify import (
    ASSIGNED,
    ComparisonResult,
    Question,
    as_asked,
    compare_symbolically,
    is_refused,
    other_letters,
    other_name,
    require_math_verify,
    with_functions,
    without_dollars,
)
from posttrain.rewards.parsing.exact_numbers import MAX_CHARACTERS
from posttrain.rewards.parsing.final_answers import AS_HYPHEN, answer_in
from posttrain.rewards.parsing.units import gold_value, measured_value


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
        golds = gold_answers(answer, ground_truth, len(completions))
        rows = list(zip(completions, finish_reasons, (gold.text for gold in golds), strict=True))
        first = [quickly(text, finish == "length", gold) for text, finish, gold in rows]

        def compared(questions: list[Question]) -> list[Graded | ScoringFailure]:
            if self.symbolic:
                said = compare_symbolically(questions, resources.sandboxes, cpu_seconds=self.cpu_seconds)
            else:
                known = (assigned(question.gold) for question in questions)
                readable = [gold_value(gold) is not None or gold_name(gold) is not None for gold in known]
                said = [ComparisonResult.UNREADABLE if each else ComparisonResult.NO_GOLD for each in readable]
            return [slowly(*each) for each in zip(said, questions, strict=True)]

        graded, named = answered_together(first, Question, compared), resources.memory(self, set[str])
        for verdict, gold in zip(graded, golds, strict=True):
            if isinstance(verdict, Graded) and verdict.outcome is AnswerOutcome.NO_GOLD:
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
        return Graded(None, AnswerOutcome.NO_GOLD)
    found = answer_in(text, cut_off=cut_off)
    if found is None or not found.strip():
        return missing_answer(cut_off)
    if len(found) > MAX_CHARACTERS:
        return Graded(0.0, AnswerOutcome.REFUSED)
    found, gold = found.translate(AS_HYPHEN), gold.translate(AS_HYPHEN)
    if other_name(found, gold):
        return graded_answer(False)
    expected, given = gold_value(assigned(gold)), measured_value(assigned(found))
    if expected is not None:
        same = None if given is None else expected.same(given)
    else:
        same = same_name(assigned(found), assigned(gold))
    if same is not None:
        return graded_answer(same)
    found, gold = with_functions(without_dollars(found)), with_functions(without_dollars(gold))
    if is_refused(found, gold):
        return Graded(0.0, AnswerOutcome.REFUSED)
    if other_letters(found, gold):
        return graded_answer(False)
    return Question(as_asked(gold), as_asked(assigned(found)))


def slowly(said: ComparisonResult, question: Question) -> Graded | ScoringFailure:
    match said:
        case ComparisonResult.SAME | ComparisonResult.DIFFERENT:
            return graded_answer(said is ComparisonResult.SAME)
        case ComparisonResult.NO_GOLD:
            return Graded(None, AnswerOutcome.NO_GOLD)
        case ComparisonResult.LOST:
            return ScoringFailure(f"the sandbox lost the comparison with {question.gold!r}")
    return Graded(0.0, AnswerOutcome(said))
