"""Questions to one of our functions in the sandbox, several per process; a process that dies is replaced.

The function parses text and never runs it, so questions may share a process, unlike programs.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar, cast

from posttrain.sandbox.execution import Execution, Exit, Limits, Process, Sandbox, StartedProcess
from posttrain.sandbox.inside import plain

TOGETHER = 8
"""Questions that share a process."""
Question = TypeVar("Question")
Verdict = TypeVar("Verdict")


class Unanswered(StrEnum):
    """Why a question has no answer."""

    RAISED = "raised"
    """The function raised, or returned a value that is not plain."""
    CRASHED = "crashed"
    """Its process ran out of memory or of stack."""
    TIME_LIMIT = "time_limit"
    LOST = "lost"
    """The sandbox failed, or the process waited too long for a processor: the question is not at fault."""


ENDINGS = {Exit.CPU_LIMIT: Unanswered.TIME_LIMIT, Exit.WALL_LIMIT: Unanswered.LOST}
"""What the end of a process means for its current question; any other end is CRASHED."""


@dataclass(frozen=True, slots=True)
class SandboxFunction:
    """One of our functions in the sandbox."""

    name: str
    source: str
    """A program that imports or defines it."""


class FunctionQuestions:
    """A conversation: some questions, each a list of arguments, to one process at a time."""

    def __init__(self, function: SandboxFunction, questions: Sequence[Sequence[object]], cpu_seconds: float) -> None:
        self.function, self.questions, self.cpu_seconds = function, questions, cpu_seconds
        self.said: list[object] = []
        """The function's values, or Unanswered."""
        self.loaded = False

    def begin(self, sandbox: Sandbox) -> None:
        self.loaded = False
        in_all = Limits(cpu_seconds=self.cpu_seconds * (1 + self.left), memory_bytes=512 << 20)
        process = sandbox.start(self, Process(kind="calls", source=self.function.source, limits=in_all))
        process.allow(self.cpu_seconds)

    @property
    def left(self) -> int:
        return len(self.questions) - len(self.said)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        kind, first, *_ = json.loads(payload)
        if self.loaded:
            self.said.append(plain.load(first.encode()) if kind == "value" else Unanswered.RAISED)
        self.loaded = True
        if not self.left:
            process.end()
            return
        process.allow(self.cpu_seconds)
        process.send(plain.dump([self.function.name, list(self.questions[len(self.said)]), {}]))

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        if not self.left:
            return
        if execution.exit is Exit.LOST or not self.loaded:
            self.said += [Unanswered.LOST] * self.left
            return
        # The function only computes: if it reached the limit by the clock, it had no processor.
        self.said.append(ENDINGS.get(execution.exit, Unanswered.CRASHED))
        if self.left:
            self.begin(sandbox)


def sandbox_answers(
    sandbox: Sandbox, function: SandboxFunction, questions: Sequence[Sequence[object]], *, cpu_seconds: float
) -> list[object]:
    parts = [questions[start : start + TOGETHER] for start in range(0, len(questions), TOGETHER)]
    conversations = [FunctionQuestions(function, part, cpu_seconds) for part in parts]
    sandbox.converse(conversations)
    return [said for talk in conversations for said in talk.said]


def answered_together(
    first: Sequence[Verdict | Question], kind: type[Question], answer: Callable[[list[Question]], Iterable[Verdict]]
) -> list[Verdict]:
    """Verdicts, in which each question (of type `kind`) is replaced by its answer; all are answered in one call."""
    questions = [each for each in first if isinstance(each, kind)]
    answers = iter(answer(questions) if questions else ())
    return [next(answers) if isinstance(each, kind) else cast(Verdict, each) for each in first]
