"""A program's results while its tests run: the outcome of each, and the time they take together."""

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.sandbox.execution import Conversation, Execution, Exit, Limits, Process, Sandbox, StartedProcess
from posttrain.sandbox.sandboxed_process import PATIENCE, waited_here


class CodeOutcome(StrEnum):
    """How a program fared in a test; of a completion, how its first failed test failed, or why it did not run."""

    PASSED = "passed"
    WRONG = "wrong"
    SYNTAX_ERROR = "syntax_error"
    RAISED = "raised"
    """An exception, a crash or an exit status other than 0."""
    TIME_LIMIT = "time_limit"
    PROGRAM_LIMIT = "program_limit"
    """All tests together took longer than `program_seconds`."""
    OUTPUT_LIMIT = "output_limit"
    THREAD_LIMIT = "thread_limit"
    NOT_PLAIN = "not_plain"
    """The result is not plain data, so it cannot be compared."""
    NOT_RUN = "not_run"
    """An earlier test failed, and no more were needed."""
    TOO_LONG = "too_long"
    """A program of more than 100,000 characters, which is not run."""
    NO_CODE = "no_code"
    TRUNCATED = "truncated"
    """No program, and the length limit cut the completion off."""
    NOT_TESTED = "not_tested"
    """The row has no tests."""


ENDINGS = {
    Exit.CPU_LIMIT: CodeOutcome.TIME_LIMIT,
    Exit.WALL_LIMIT: CodeOutcome.TIME_LIMIT,
    Exit.OUTPUT_LIMIT: CodeOutcome.OUTPUT_LIMIT,
    Exit.THREAD_LIMIT: CodeOutcome.THREAD_LIMIT,
}
"""What the end of a process means for its current test; any other end is RAISED."""


def outcome_of_end(execution: Execution) -> CodeOutcome:
    if not execution.compiled and execution.exit is Exit.FINISHED and execution.status == 1:
        return CodeOutcome.SYNTAX_ERROR
    if execution.most:
        return CodeOutcome.PROGRAM_LIMIT
    return ENDINGS.get(execution.exit, CodeOutcome.RAISED)


@dataclass(slots=True)
class ProgramResult:
    """A program's results, test by test, as they come in."""

    count: int
    stop_at_failure: bool
    """Whether the other tests are NOT_RUN after the first failure."""
    outcomes: list[CodeOutcome] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    """Largest of any of its processes."""
    compiled: bool = False
    lost: bool = False
    """The sandbox failed, so the outcomes mean nothing."""
    starved: bool = False
    """It was ended after waiting too long for a processor, so the outcomes mean nothing."""

    @property
    def at(self) -> int:
        return len(self.outcomes)

    @property
    def complete(self) -> bool:
        return self.at == self.count

    def record(self, outcome: CodeOutcome, cpu_seconds: float) -> None:
        self.outcomes.append(outcome)
        self.cpu_seconds.append(cpu_seconds)
        if outcome is not CodeOutcome.PASSED and self.stop_at_failure:
            self.fill(CodeOutcome.NOT_RUN)

    def fill(self, outcome: CodeOutcome) -> None:
        """Give all remaining tests the same outcome."""
        left = self.count - self.at
        self.outcomes += [outcome] * left
        self.cpu_seconds += [0.0] * left

    def note(self, execution: Execution) -> None:
        self.memory_bytes = max(self.memory_bytes, execution.memory_bytes)
        self.compiled |= execution.compiled
        self.lost |= execution.exit is Exit.LOST
        self.starved |= execution.starved


class ProgramClock:
    """Limits the seconds by the clock of a program's tests together, without its and our waits for a processor."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.began: float | None = None
        self.granted = 0.0
        """Extra seconds for starting, in sandboxes where each run starts anew."""
        self.processes: list[StartedProcess] = []
        self.waited_here = 0.0

    def start(self, sandbox: Sandbox, conversation: Conversation, asked: Process) -> StartedProcess:
        """Start a process with the remaining seconds; the first one starts the clock."""
        now = time.monotonic()
        if self.began is None:
            self.began, self.waited_here = now, waited_here()
        self.granted += sandbox.start_seconds
        left = max(0.0, self.until() - now)
        process = sandbox.start(conversation, replace(asked, limits=replace(asked.limits, most_seconds=left)))
        self.processes.append(process)
        return process

    def message(self, sandbox: Sandbox) -> None:
        self.granted += sandbox.start_seconds

    def until(self) -> float:
        assert self.began is not None
        waited = waited_here() - self.waited_here + sum(each.waited_seconds() for each in self.processes)
        return self.began + self.limits.most_seconds + self.granted + waited

    def fill(self, result: ProgramResult) -> bool:
        """If time is up, mark the remaining tests as not run; returns whether none remains."""
        assert self.began is not None
        if result.complete or result.starved:
            return True
        if time.monotonic() >= self.until():
            result.fill(CodeOutcome.PROGRAM_LIMIT)
            return True
        result.starved = time.monotonic() > self.began + PATIENCE * self.limits.most_seconds + self.granted
        return result.starved
