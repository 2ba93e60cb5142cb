"""Whether any program can pass a row's tests, found out before training: broken tests would score all programs 0.

The tests are read, and those that are Python run once in the sandbox against a function that raises whatever it is
asked.  A test that fails before it asks anything would fail for every program.  Where a row has a program of its own in
the column `solution`, that one has to pass.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from posttrain.errors import UserError
from posttrain.rewards.code.program_result import TestOutcome
from posttrain.rewards.code.program_text import program_in
from posttrain.rewards.code.unit_test_runs import UnitTestRun, with_time
from posttrain.rewards.code.unit_tests import AssertTests, Tests, read_tests
from posttrain.sandbox.conversation import Sandbox, StartedProcess
from posttrain.sandbox.execution import Execution, Exit, Limits, Process

NamedRow = tuple[str, Mapping[str, object]]
"""Where a row stands, and its columns."""
RunOf = Callable[[str, Tests], UnitTestRun]
"""Makes a run of a program on tests."""
SOLUTION = "solution"
NO_CALL = ["error", "RuntimeError", "there is no program yet"]
NEVER_RUNS = {"SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError"}
"""Errors that have nothing to do with what an earlier test left behind."""
MOST_NAMED = 5


class AssertTestCheck:
    """Runs setup and tests without a program, and notes what fails of itself."""

    def __init__(self, tests: AssertTests, limits: Limits) -> None:
        self.tests, self.limits = tests, limits
        self.results: list[tuple[bool, list[str]]] = []
        """Of the setup, then of each test: whether it asked for the function, and what it came to."""
        self.asked = False
        self.fault = ""

    @property
    def conversation(self) -> "AssertTestCheck":
        """What the sandbox is to have."""
        return self

    def begin(self, sandbox: Sandbox) -> None:
        names = {"entry": self.tests.entry, "setup": self.tests.setup, "tests": ["pass", *self.tests.tests]}
        limits = with_time(self.limits, self.cpu_seconds(0))
        sandbox.start(self, Process(kind="tests", source=json.dumps(names), limits=limits))

    def cpu_seconds(self, number: int) -> float:
        """What a run gives the setup and the first test together, and each test after them."""
        return self.limits.cpu_seconds * (len(self.tests) + 1 if number < 2 else 1)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        kind, said = json.loads(payload)  # our own code wrote it
        if kind == "call":
            self.asked = True
            process.allow(self.limits.cpu_seconds)
            process.send(json.dumps(NO_CALL).encode())
        else:
            self.results.append((self.asked, said))
            self.asked = False
            if len(self.results) > 1:  # the setup is no test of a run
                process.allow(self.limits.cpu_seconds)

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        at = len(self.results)
        if execution.exit is Exit.LOST or execution.starved:
            return  # says nothing of the tests
        if execution.exit in (Exit.CPU_LIMIT, Exit.WALL_LIMIT) and not self.asked:
            self.fault = f"{self.place(at)} comes to no end within {self.cpu_seconds(at):g} s"
        else:
            self.fault = self.first_fault()

    def place(self, number: int) -> str:
        """What the setup and the tests are called in a message."""
        return f"tests[{number - 1}]" if number else "the setup"

    def first_fault(self) -> str:
        """The first result that is bad whatever the program is; empty where there is none."""
        asked_before = False
        for number, (asked, said) in enumerate(self.results):
            if said[0] == "not_plain" and not asked:
                return f"{self.place(number)} calls a function with what is no plain data: {said[2]}; no program is asked"
            if said[0] == "error" and not asked and (not asked_before or said[1] in NEVER_RUNS):
                return f"{self.place(number)} raises {said[1]}: {said[2]}, whatever the program is"
            asked_before |= asked
        if len(self.results) == len(self.tests) + 1 and not asked_before:
            return f"no test calls {' or '.join(self.tests.entry)}, so every program would pass"
        return ""


class SolutionCheck:
    """A row's own program on the row's tests."""

    def __init__(self, solution: str, tests: Tests, run_of: RunOf) -> None:
        fenced = program_in(solution)
        self.prose = fenced is None
        self.conversation = run_of(fenced or solution, tests)

    @property
    def fault(self) -> str:
        """What keeps it from passing; text that is no program says nothing."""
        result = self.conversation.result
        failed = [at for at, outcome in enumerate(result.outcomes) if outcome is not TestOutcome.PASSED]
        if result.lost or result.starved or not failed:
            return ""
        outcome = result.outcomes[failed[0]]
        if self.prose and outcome is TestOutcome.SYNTAX_ERROR:
            return ""
        return f"the row's own `{SOLUTION}` does not pass them: test {failed[0] + 1} of {result.count} is {outcome}"


def require_passable(sandbox: Sandbox, rows: Iterable[NamedRow], limits: Limits, run_of: RunOf) -> None:
    """Refuse rows whose tests cannot be read, or that no program can pass.  Raises UserError with their names."""
    faults: list[str] = []
    checks: list[tuple[str, AssertTestCheck | SolutionCheck]] = []
    for where, columns in rows:
        if columns.get("tests") is None:
            continue
        try:
            tests = read_tests(columns["tests"])
        except UserError as error:
            faults.append(f"{where}: {error}")
            continue
        if isinstance(tests, AssertTests):
            unnamed = unnamed_entry(tests)
            if unnamed:
                faults.append(f"{where}: tests: no test names {unnamed}, so every program would be scored alike")
                continue
            checks.append((where, AssertTestCheck(tests, limits)))
        solution = columns.get(SOLUTION)
        if isinstance(solution, str) and solution.strip():
            checks.append((where, SolutionCheck(solution, tests, run_of)))
    if checks:
        sandbox.converse([check.conversation for _, check in checks])
    found = {where: check.fault for where, check in reversed(checks) if check.fault}  # of two, what came first
    faults += [
        f"{where}: tests: {found[where]}" for where in dict.fromkeys(where for where, _ in checks) if where in found
    ]
    if faults:
        refuse(faults)


def refuse(faults: Sequence[str]) -> None:
    """Name the rows."""
    more = f"\n  and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
    raise UserError(
        f"{len(faults)} row(s) have tests that no program can be judged by.  Mend them, or leave the rows out.\n  "
        + "\n  ".join(faults[:MOST_NAMED])
        + more
    )


def unnamed_entry(tests: AssertTests) -> str:
    """A function that is asked for and occurs nowhere in the tests."""
    text = "\n".join([tests.setup, *tests.tests])
    return next((name for name in tests.entry if not re.search(rf"\b{re.escape(name)}\b", text)), "")
