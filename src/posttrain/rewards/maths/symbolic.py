"""Answers that are no plain numbers, compared by math-verify inside the sandbox, a few to a process."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from posttrain.errors import UserError
from posttrain.sandbox import inside
from posttrain.sandbox.conversation import Sandbox, StartedProcess
from posttrain.sandbox.execution import Execution, Exit, Limits, Process, ServerOptions
from posttrain.sandbox.inside import plain
from posttrain.sandbox.modules import FEW
from posttrain.sandbox.sandboxes import Sandboxes, site_packages

MEMORY_BYTES = 512 << 20
TOGETHER = 8
"""Questions that share a process."""
PREPARE = Path(inside.__file__).with_name("math_check.py")
SOURCE = "from prepared import compare"


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


class AnswerComparison:
    """A conversation that has some questions answered by one process; one that dies is replaced for those left.

    What is compared is text that is parsed and never run, so questions may share a process as programs may not.
    """

    def __init__(self, questions: Sequence[Question], cpu_seconds: float) -> None:
        self.questions, self.cpu_seconds = questions, cpu_seconds
        self.said: list[ComparisonResult] = []
        self.loaded = False

    def begin(self, sandbox: Sandbox) -> None:
        """A process for the questions that are left."""
        self.loaded = False
        in_all = Limits(cpu_seconds=self.cpu_seconds * (1 + self.left), memory_bytes=MEMORY_BYTES)
        process = sandbox.start(self, Process(kind="calls", source=SOURCE, limits=in_all))
        process.allow(self.cpu_seconds)

    @property
    def left(self) -> int:
        """Questions without an answer."""
        return len(self.questions) - len(self.said)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        """Ready, or an answer: our own code speaks there."""
        kind, first, *_ = json.loads(payload)
        if self.loaded:
            said = plain.load(first.encode()) if kind == "value" else None
            self.said.append(ComparisonResult(said) if isinstance(said, str) else ComparisonResult.UNREADABLE)
        self.loaded = True
        if not self.left:
            process.end()
            return
        question = self.questions[len(self.said)]
        process.allow(self.cpu_seconds)
        process.send(plain.dump(["compare", [question.gold, question.answer], {}]))

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        """Its end is the answer to the question that it was at, unless it had none left."""
        if not self.left:
            return
        if execution.exit is Exit.LOST or not self.loaded:
            self.said += [ComparisonResult.LOST] * self.left
            return
        limits = (Exit.CPU_LIMIT, Exit.WALL_LIMIT)
        # Else it ran out of memory or of stack.
        self.said.append(ComparisonResult.TIME_LIMIT if execution.exit in limits else ComparisonResult.UNREADABLE)
        if self.left:
            self.begin(sandbox)


def compare_symbolically(
    questions: Sequence[Question], sandboxes: Sandboxes, *, cpu_seconds: float
) -> list[ComparisonResult]:
    """An answer for every question, each asked once."""
    different = list(dict.fromkeys(questions))
    parts = [different[start : start + TOGETHER] for start in range(0, len(different), TOGETHER)]
    conversations = [AnswerComparison(part, cpu_seconds) for part in parts]
    sandbox_with_maths(sandboxes).converse(conversations)
    answers = {
        question: said for talk in conversations for question, said in zip(talk.questions, talk.said, strict=True)
    }
    return [answers[question] for question in questions]


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
