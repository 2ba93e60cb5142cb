"""Runs a program against its tests, as conversations with the sandbox.

Expected values never enter the program's process, and only plain data crosses.  A test passes by what is compared here,
or for asserts in a second process that the program cannot reach; the program's exit status proves nothing.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from posttrain.errors import UserError
from posttrain.rewards.code import unit_tests
from posttrain.rewards.code.unit_tests import AssertTests, CallTests, StdioTests, Tests, same_value
from posttrain.sandbox.execution import Execution, Exit, Limits, Process, Sandbox, StartedProcess
from posttrain.sandbox.inside import plain
from posttrain.sandbox.inside.frames import MAX_BYTES
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
        left = self.count - self.at
        self.outcomes += [outcome] * left
        self.cpu_seconds += [0.0] * left

    def note(self, execution: Execution) -> None:
        self.memory_bytes = max(self.memory_bytes, execution.memory_bytes)
        self.compiled |= execution.compiled
        self.lost |= execution.exit is Exit.LOST
        self.starved |= execution.starved


class UnitTestRun:
    """A conversation about one program and its tests that fills in `result`.

    It limits the seconds by the clock of all tests together, without the program's and our waits for a processor.
    """

    def __init__(self, source: str, tests: Tests, limits: Limits, *, stop_at_failure: bool) -> None:
        self.source, self.tests, self.limits = source, tests, limits
        self.result = ProgramResult(len(tests.cases), stop_at_failure)
        self.used = 0.0  # processor time when the running test began
        self.asked = True  # the program owes an answer
        self.processes: list[StartedProcess] = []
        self.began = self.waited_here = 0.0
        self.granted = 0.0
        """Extra seconds for the start, in sandboxes where each run is a new process."""

    def start(self, sandbox: Sandbox, asked: Process) -> StartedProcess:
        """Start a process with the remaining seconds; the first one starts the clock."""
        now = time.monotonic()
        if not self.processes:
            self.began, self.waited_here = now, waited_here()
        self.granted += sandbox.start_seconds
        left = max(0.0, self.until() - now)
        process = sandbox.start(self, replace(asked, limits=replace(asked.limits, most_seconds=left)))
        self.processes.append(process)
        return process

    def until(self) -> float:
        waited = waited_here() - self.waited_here + sum(each.waited_seconds() for each in self.processes)
        return self.began + self.limits.most_seconds + self.granted + waited

    def is_over(self) -> bool:
        """Whether no test remains; if time is up, the remaining ones are marked as not run."""
        if self.result.complete or self.result.starved:
            return True
        if time.monotonic() >= self.until():
            self.result.fill(CodeOutcome.PROGRAM_LIMIT)
            return True
        self.result.starved = time.monotonic() > self.began + PATIENCE * self.limits.most_seconds + self.granted
        return self.result.starved

    def begin(self, sandbox: Sandbox) -> None:
        raise NotImplementedError

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        """Messages of a process that only prints are ignored."""

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        raise NotImplementedError


class StdioTestRun(UnitTestRun):
    """A whole program, once for each test."""

    tests: StdioTests

    def begin(self, sandbox: Sandbox) -> None:
        given = self.tests.cases[self.result.at][0].encode("utf-8", "surrogatepass")
        self.start(sandbox, Process(kind="program", source=self.source, stdin=given, limits=self.limits))

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        self.result.note(execution)
        if self.result.lost:
            return
        if not execution.compiled:
            self.result.fill(outcome_of_end(execution))
            return
        if not execution.succeeded:
            outcome = outcome_of_end(execution)
        else:
            printed, expected = execution.stdout.decode("utf-8", "replace"), self.tests.cases[self.result.at][1]
            right = unit_tests.counted_lines(printed) == unit_tests.counted_lines(expected)
            outcome = CodeOutcome.PASSED if right else CodeOutcome.WRONG
        self.result.record(outcome, execution.cpu_seconds)
        if not self.is_over():
            self.begin(sandbox)


class CallTestRun(UnitTestRun):
    """A program whose function is called once for each test; a process that dies is replaced."""

    tests: CallTests
    loaded = False

    def begin(self, sandbox: Sandbox) -> None:
        self.loaded, self.asked, self.used = False, True, 0.0
        in_all = (self.result.count - self.result.at + 1) * self.limits.cpu_seconds
        process = self.start(sandbox, candidate(self.source, self.limits, in_all))
        process.allow(self.limits.cpu_seconds)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        if not self.asked:  # it writes to the channel unasked; `ended` handles this
            process.end()
            return
        self.asked = False
        said, detail = call_result(payload)
        if not self.loaded:
            self.loaded = True
            if said is not CodeOutcome.PASSED:  # its source failed: so would every call
                self.result.fill(said)
        else:
            now = process.cpu_seconds()
            late = now - self.used > self.limits.cpu_seconds  # noticed late on a busy machine
            expected, tolerance = self.tests.cases[self.result.at].expected, self.tests.tolerance
            if said is CodeOutcome.PASSED and not same_value(detail, expected, tolerance):
                said = CodeOutcome.WRONG
            self.result.record(CodeOutcome.TIME_LIMIT if late else said, now - self.used)
            self.used = now
        if self.is_over():
            process.end()
            return
        self.granted += sandbox.start_seconds
        case, entry = self.tests.cases[self.result.at], self.tests.entry
        message = plain.dump([entry, list(case.arguments), dict(case.named)])
        if len(message) > MAX_BYTES:
            size = f"have {len(message):,} bytes; at most {MAX_BYTES:,} are allowed"
            raise UserError(f"tests: arguments for {entry} {size}.")
        self.asked = True
        process.allow(self.limits.cpu_seconds)
        process.send(message)

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        self.result.note(execution)
        if self.result.lost or self.result.complete:
            return
        outcome = outcome_of_end(execution)
        if not self.loaded:
            self.result.fill(outcome)
            return
        self.result.record(outcome, max(0.0, execution.cpu_seconds - self.used))
        if not self.is_over():
            self.begin(sandbox)


class AssertTestRun(UnitTestRun):
    """Two processes, the program and the tests; the tests' calls are passed on to the program, its results back."""

    tests: AssertTests
    program: StartedProcess | None = None
    tester: StartedProcess | None = None
    ending: CodeOutcome | None = None
    """How the program's process ended, once it has."""
    of_ended = 0.0
    """Processor time of the program's process, once it has ended."""

    def begin(self, sandbox: Sandbox) -> None:
        in_all = (self.result.count + 1) * self.limits.cpu_seconds
        self.program = self.start(sandbox, candidate(self.source, self.limits, in_all))
        self.program.allow(self.limits.cpu_seconds)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        if process is self.program:
            self.from_program(sandbox, payload)
        else:
            self.from_tester(sandbox, payload)

    def from_program(self, sandbox: Sandbox, payload: bytes) -> None:
        if not self.asked and self.program is not None:
            self.program.end()
            return
        self.asked = False
        if self.program is not None:
            self.program.rest()  # until the next call, the tests may take their time
        said, detail = call_result(payload)
        if self.tester is not None and said is CodeOutcome.PASSED:
            self.reply(["value", plain.dump(detail).decode("utf-8", "surrogatepass")])  # what was read can be written
        elif self.tester is not None:
            error = detail if isinstance(detail, tuple) else ("RuntimeError", "the result is not plain data")
            self.reply(["error", *error])
        elif said is CodeOutcome.PASSED:
            names = {"entry": self.tests.entry, "setup": self.tests.setup, "tests": self.tests.cases}
            limits = replace(self.limits, cpu_seconds=(self.result.count + 1) * self.limits.cpu_seconds)
            asked = Process(kind="tests", source=json.dumps(names), limits=limits)
            self.used = self.cpu_seconds()
            self.tester = self.start(sandbox, asked)
        else:  # its source failed
            self.result.fill(said)
            self.finish()

    def from_tester(self, sandbox: Sandbox, payload: bytes) -> None:
        if self.tester is None or self.result.complete:  # it was still running when it was ended
            return
        try:
            kind, said = json.loads(payload)  # our own code wrote it
        except ValueError:  # and the place it ran in broke it off
            self.result.lost = True
            self.finish()
            return
        if kind == "result":
            before, self.used = self.used, self.cpu_seconds()
            self.tester.allow(self.limits.cpu_seconds)
            outcome = CodeOutcome.PASSED
            if said == GONE:
                outcome = self.ending or CodeOutcome.RAISED
            elif said[0] != "value":
                outcome = CodeOutcome.WRONG if said[1] == "AssertionError" else CodeOutcome.RAISED
            self.result.record(outcome, max(0.0, self.used - before))
            if self.is_over():
                self.finish()
        elif self.ending is not None or self.program is None:
            self.reply(GONE)
        else:
            self.asked = True
            self.granted += sandbox.start_seconds
            self.tester.rest()
            self.program.allow(self.limits.cpu_seconds)
            self.program.send(said.encode("utf-8", "surrogatepass"))

    def cpu_seconds(self) -> float:
        running = [each for each in (self.program if self.ending is None else None, self.tester) if each is not None]
        return self.of_ended + sum(each.cpu_seconds() for each in running)

    def reply(self, said: Sequence[object]) -> None:
        assert self.tester is not None
        self.tester.allow(self.limits.cpu_seconds)
        self.tester.send(json.dumps(said).encode())

    def finish(self) -> None:
        for process in (self.program, self.tester):
            if process is not None:
                process.end()

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        self.result.note(execution)
        if process is self.program:
            self.ending, self.of_ended = outcome_of_end(execution), execution.cpu_seconds
            if self.tester is None:
                self.result.fill(self.ending)
            elif not self.result.complete:
                self.reply(GONE)  # a call was under way, or the next one gets this
        elif not self.result.complete and not self.result.lost:
            # The tests did not finish: a loop of theirs, or a program that never stops answering.
            self.result.fill(outcome_of_end(execution))
            self.finish()


GONE = ["error", "RuntimeError", "the program has ended"]


def candidate(source: str, limits: Limits, cpu_seconds: float) -> Process:
    return Process(kind="calls", source=source, limits=replace(limits, cpu_seconds=cpu_seconds))


def call_result(payload: bytes) -> tuple[CodeOutcome, object]:
    """A program's reply to a call, which a hostile program may have written itself."""
    with suppress(ValueError, RecursionError, plain.NotPlainError):
        match json.loads(payload):
            case ["value", str(written)]:
                return CodeOutcome.PASSED, plain.load(written.encode("utf-8", "surrogatepass"))
            case ["error", str(kind), str(message)]:
                return CodeOutcome.RAISED, (kind, message)
    return CodeOutcome.NOT_PLAIN, ""


RUN_KINDS: dict[type, type[UnitTestRun]] = {
    StdioTests: StdioTestRun,
    CallTests: CallTestRun,
    AssertTests: AssertTestRun,
}
