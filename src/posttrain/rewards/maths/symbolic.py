"""Answers that are no plain numbers, compared by math-verify inside the sandbox, a few to a process."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from posttrain.errors import UserError
from posttrain.rewards.function_questions import AskedFunction, Unanswered, answers
from posttrain.sandbox import inside
from posttrain.sandbox.conversation import Sandbox
from posttrain.sandbox.execution import FEW, ServerOptions
from posttrain.sandbox.sandboxes import Sandboxes, site_packages

SOURCE = "from prepared import compare"
PREPARE = Path(inside.__file__).with_name("math_check.py")


class ComparisonResult(StrEnum):
    """What comes of a comparison."""

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
    said = answers(sandbox_with_maths(sandboxes), AskedFunction("compare", SOURCE), asked, cpu_seconds=cpu_seconds)
    results = dict(zip(different, map(as_result, said), strict=True))
    return [results[question] for question in questions]


def as_result(said: object) -> ComparisonResult:
    """What a reply, or the lack of one, says of an answer."""
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
    """Refuse to go on where the extra that reads expressions is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "reward maths: answers that are no plain numbers need math-verify, which is not installed.\n"
            "    `pip install posttrain[math]`, or set the reward's option symbolic: false to leave such answers out."
        )
