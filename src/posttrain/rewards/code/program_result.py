"""What is known of a program while its tests run: the outcome of each, and how long all of it has taken."""

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.sandbox.execution import Conversation, Execution, Exit, Limits, Process, Sandbox, StartedProcess
from posttrain.sandbox.processor_waits import PATIENCE, waited_here


class TestOutcome(StrEnum):
    """How a program fared in one test."""

    __test__ = False  # pytest: not a test class

    PASSED = "passed"
    WRONG = "wrong"
    SYNTAX_ERROR = "syntax_error"
    RAISED = "raised"
    """An exception, a crash or an exit status other than 0."""
    TIME_LIMIT = "time_limit"
    PROGRAM_LIMIT = "program_limit"
    """All tests together took longer than a program may."""
    OUTPUT_LIMIT = "output_limit"
    THREAD_LIMIT = "thread_limit"
    NOT_PLAIN = "not_plain"
    """The result is not plain data, so it cannot be compared."""
    NOT_RUN = "not_run"
    """An earlier test failed, and no more were needed."""


ENDINGS = {
    Exit.CPU_LIMIT: TestOutcome.TIME_LIMIT,
    Exit.WALL_LIMIT: TestOutcome.TIME_LIMIT,
    Exit.OUTPUT_LIMIT: TestOutcome.OUTPUT_LIMIT,
    Exit.THREAD_LIMIT: TestOutcome.THREAD_LIMIT,
}
"""What the end of a process says of the test that it was in; any other end is RAISED."""


def outcome_of_end(execution: Execution) -> TestOutcome:
    """What the end of a process that did not pass says."""
    if not execution.compiled and execution.exit is Exit.FINISHED and execution.status == 1:
        return TestOutcome.SYNTAX_ERROR
    if execution.most:
        return TestOutcome.PROGRAM_LIMIT
    return ENDINGS.get(execution.exit, TestOutcome.RAISED)


@dataclass(slots=True)
class ProgramResult:
    """A program's results, test by test, as they come in."""

    count: int
    """Tests that there are."""
    stop_at_failure: bool
    """Whether the first failure leaves the other tests NOT_RUN."""
    outcomes: list[TestOutcome] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    """Largest of any of its processes."""
    compiled: bool = False
    lost: bool = False
    """The sandbox failed; what is recorded says nothing."""
    starved: bool = False
    """It was ended after waiting too long for a processor; what is recorded says nothing."""

    @property
    def at(self) -> int:
        """The index of the test that is next, or running."""
        return len(self.outcomes)

    @property
    def complete(self) -> bool:
        return self.at == self.count

    def record(self, outcome: TestOutcome, cpu_seconds: float) -> bool:
        """Add a test's result; returns whether there is another test to run."""
        self.outcomes.append(outcome)
        self.cpu_seconds.append(cpu_seconds)
        if outcome is not TestOutcome.PASSED and self.stop_at_failure:
            self.fill(TestOutcome.NOT_RUN)
        return not self.complete

    def fill(self, outcome: TestOutcome) -> None:
        """Give all tests that are left the same result."""
        left = self.count - self.at
        self.outcomes += [outcome] * left
        self.cpu_seconds += [0.0] * left

    def note(self, execution: Execution) -> None:
        """Add what the end of a process shows."""
        self.memory_bytes = max(self.memory_bytes, execution.memory_bytes)
        self.compiled |= execution.compiled
        self.lost |= execution.exit is Exit.LOST
        self.starved |= execution.starved


class ProgramClock:
    """Holds a program to the seconds that it may take for all of its tests together.

    They are seconds by the clock, without those in which its processes, or we, waited for a processor.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.began: float | None = None
        self.granted = 0.0
        """Seconds on top, for what starting takes where each run starts anew."""
        self.processes: list[StartedProcess] = []
        self.waited_here = 0.0

    def start(self, sandbox: Sandbox, conversation: Conversation, asked: Process) -> StartedProcess:
        """Start a process with the seconds that are left; the clock runs from the first one on."""
        now = time.monotonic()
        if self.began is None:
            self.began, self.waited_here = now, waited_here()
        self.granted += sandbox.start_seconds
        left = max(0.0, self.until() - now)
        process = sandbox.start(conversation, replace(asked, limits=replace(asked.limits, most_seconds=left)))
        self.processes.append(process)
        return process

    def message(self, sandbox: Sandbox) -> None:
        """Add the time that a message costs where each run starts anew."""
        self.granted += sandbox.start_seconds

    def until(self) -> float:
        assert self.began is not None
        waited = waited_here() - self.waited_here + sum(each.waited_seconds() for each in self.processes)
        return self.began + self.limits.most_seconds + self.granted + waited

    def over(self) -> bool:
        return time.monotonic() >= self.until()

    def fill(self, result: ProgramResult) -> bool:
        """Where time is up, mark the tests left as not run; returns whether none is left to run."""
        assert self.began is not None
        if result.complete or result.starved:
            return True
        if self.over():
            result.fill(TestOutcome.PROGRAM_LIMIT)
            return True
        result.starved = time.monotonic() > self.began + PATIENCE * self.limits.most_seconds + self.granted
        return result.starved
