"""Runs a program against its tests, as conversations with the sandbox.

Expected values never enter the program's process.  Only plain data crosses.  A test passes by what is compared here, or
for asserts in a second process that the program cannot reach; the program's exit status proves nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from posttrain.errors import UserError
from posttrain.rewards.code.program_result import CodeOutcome, ProgramClock, ProgramResult, outcome_of_end
from posttrain.rewards.code.unit_tests import (
    AssertTests,
    CallCase,
    CallTests,
    StdioTests,
    Tests,
    same_output,
    same_value,
)
from posttrain.sandbox.execution import Execution, Limits, Process, Sandbox, StartedProcess
from posttrain.sandbox.inside import plain
from posttrain.sandbox.inside.frames import MAX_BYTES


class UnitTestRun:
    """A conversation about one program and its tests that fills in `result`."""

    def __init__(self, source: str, tests: Tests, limits: Limits, *, stop_at_failure: bool) -> None:
        self.source, self.tests, self.limits = source, tests, limits
        self.result = ProgramResult(len(tests), stop_at_failure)
        self.clock = ProgramClock(limits)
        self.used = 0.0  # processor time when the running test began
        self.asked = True  # the program owes an answer

    def afresh(self) -> "UnitTestRun":
        return type(self)(self.source, self.tests, self.limits, stop_at_failure=self.result.stop_at_failure)

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
        given = self.tests.cases[self.result.at].given.encode("utf-8", "surrogatepass")
        self.clock.start(sandbox, self, Process(kind="program", source=self.source, stdin=given, limits=self.limits))

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
            right = same_output(execution.stdout.decode("utf-8", "replace"), self.tests.cases[self.result.at].printed)
            outcome = CodeOutcome.PASSED if right else CodeOutcome.WRONG
        self.result.record(outcome, execution.cpu_seconds)
        if not self.clock.fill(self.result):
            self.begin(sandbox)


class CallTestRun(UnitTestRun):
    """A program whose function is called once for each test; a process that dies is replaced."""

    tests: CallTests
    loaded = False

    def begin(self, sandbox: Sandbox) -> None:
        self.loaded, self.asked, self.used = False, True, 0.0
        in_all = (self.result.count - self.result.at + 1) * self.limits.cpu_seconds
        process = self.clock.start(sandbox, self, candidate(self.source, self.limits, in_all))
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
            outcome = CodeOutcome.TIME_LIMIT if late else self.compared(said, detail)
            self.result.record(outcome, now - self.used)
            self.used = now
        if not self.clock.fill(self.result):
            self.clock.message(sandbox)
            self.call(process, self.tests.cases[self.result.at])
        else:
            process.end()

    def compared(self, said: CodeOutcome, detail: object) -> CodeOutcome:
        if said is not CodeOutcome.PASSED:
            return said
        right = same_value(detail, self.tests.cases[self.result.at].expected, self.tests.tolerance)
        return CodeOutcome.PASSED if right else CodeOutcome.WRONG

    def call(self, process: StartedProcess, case: CallCase) -> None:
        self.asked = True
        process.allow(self.limits.cpu_seconds)
        process.send(call_message(self.tests.entry, case))

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        self.result.note(execution)
        if self.result.lost or self.result.complete:
            return
        outcome = outcome_of_end(execution)
        if not self.loaded:
            self.result.fill(outcome)
            return
        self.result.record(outcome, max(0.0, execution.cpu_seconds - self.used))
        if not self.clock.fill(self.result):
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
        self.program = self.clock.start(sandbox, self, candidate(self.source, self.limits, in_all))
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
        if self.tester is not None:
            self.reply(reply_of(said, detail))
        elif said is CodeOutcome.PASSED:
            names = {"entry": self.tests.entry, "setup": self.tests.setup, "tests": self.tests.tests}
            in_all = (self.result.count + 1) * self.limits.cpu_seconds
            asked = Process(kind="tests", source=json.dumps(names), limits=with_time(self.limits, in_all))
            self.used = self.cpu_seconds()
            self.tester = self.clock.start(sandbox, self, asked)
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
            self.result.record(self.reported_outcome(said), max(0.0, self.used - before))
            if self.clock.fill(self.result):
                self.finish()
        elif self.ending is not None or self.program is None:
            self.reply(GONE)
        else:
            self.asked = True
            self.clock.message(sandbox)
            self.tester.rest()
            self.program.allow(self.limits.cpu_seconds)
            self.program.send(said.encode("utf-8", "surrogatepass"))

    def cpu_seconds(self) -> float:
        running = [each for each in (self.program if self.ending is None else None, self.tester) if each is not None]
        return self.of_ended + sum(each.cpu_seconds() for each in running)

    def reported_outcome(self, result: list[object]) -> CodeOutcome:
        if result[0] == "value":
            return CodeOutcome.PASSED
        if result == GONE:
            return self.ending or CodeOutcome.RAISED
        return CodeOutcome.WRONG if result[1] == "AssertionError" else CodeOutcome.RAISED

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


def call_message(entry: str, case: CallCase) -> bytes:
    message = plain.dump([entry, list(case.arguments), dict(case.named)])
    if len(message) > MAX_BYTES:
        raise UserError(f"tests: arguments for {entry} have {len(message):,} bytes; at most {MAX_BYTES:,} are allowed.")
    return message


GONE = ["error", "RuntimeError", "the program has ended"]


def candidate(source: str, limits: Limits, cpu_seconds: float) -> Process:
    return Process(kind="calls", source=source, limits=with_time(limits, cpu_seconds))


def with_time(limits: Limits, cpu_seconds: float) -> Limits:
    return replace(limits, cpu_seconds=cpu_seconds)


def call_result(payload: bytes) -> tuple[CodeOutcome, object]:
    """A program's reply to a call, which a hostile program may have written itself."""
    try:
        said = json.loads(payload)
        match said:
            case ["value", str(written)]:
                return CodeOutcome.PASSED, plain.load(written.encode("utf-8", "surrogatepass"))
            case ["error", str(kind), str(message)]:
                return CodeOutcome.RAISED, (kind, message)
    except (ValueError, RecursionError, plain.NotPlainError):
        return CodeOutcome.NOT_PLAIN, ""
    return CodeOutcome.NOT_PLAIN, ""


def reply_of(said: CodeOutcome, detail: object) -> list[object]:
    if said is CodeOutcome.PASSED:
        return ["value", plain.dump(detail).decode("utf-8", "surrogatepass")]  # what was read can be written
    if isinstance(detail, tuple):
        return ["error", *detail]
    return ["error", "RuntimeError", "the result is not plain data"]


RUN_KINDS: dict[type, type[UnitTestRun]] = {
    StdioTests: StdioTestRun,
    CallTests: CallTestRun,
    AssertTests: AssertTestRun,
}
