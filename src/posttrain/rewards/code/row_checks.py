"""Checks before training whether any program can pass a row's tests: broken tests would score all programs 0.

Tests that are Python run once in the sandbox against a function that raises at every call: a test that fails before
its first call would fail for every program.  A reference program in the column `solution` has to pass.
"""

import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from posttrain.errors import UserError
from posttrain.rewards.code.unit_test_runs import CodeOutcome, UnitTestRun
from posttrain.rewards.code.unit_tests import AssertTests, CallTests, StdioTests, Tests, read_tests
from posttrain.rewards.parsing.tags import program_in
from posttrain.sandbox.execution import Execution, Exit, Limits, Process, Sandbox, StartedProcess

NamedRow = tuple[str, Mapping[str, object]]
RunOf = Callable[[str, Tests], UnitTestRun]
SOLUTION = "solution"
MOST_NAMED = 5


class AssertTestCheck:
    """Runs setup and tests without a program, and notes what fails by itself."""

    def __init__(self, tests: AssertTests, limits: Limits) -> None:
        self.tests, self.limits = tests, limits
        self.results: list[tuple[bool, list[str]]] = []
        """Of the setup, then of each test: whether it called the function, and its result."""
        self.asked = False
        self.fault = ""

    @property
    def conversation(self) -> "AssertTestCheck":
        return self

    def begin(self, sandbox: Sandbox) -> None:
        names = {"entry": self.tests.entry, "setup": self.tests.setup, "tests": ["pass", *self.tests.tests]}
        limits = replace(self.limits, cpu_seconds=self.cpu_seconds(0))
        sandbox.start(self, Process(kind="tests", source=json.dumps(names), limits=limits))

    def cpu_seconds(self, number: int) -> float:
        # the setup and the first test share theirs, as in a run
        return self.limits.cpu_seconds * (len(self.tests) + 1 if number < 2 else 1)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        kind, said = json.loads(payload)  # our own code wrote it
        if kind == "call":
            self.asked = True
            process.allow(self.limits.cpu_seconds)
            process.send(json.dumps(["error", "RuntimeError", "there is no program yet"]).encode())
        else:
            self.results.append((self.asked, said))
            self.asked = False
            if len(self.results) > 1:  # the setup is not a test
                process.allow(self.limits.cpu_seconds)

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        at = len(self.results)
        if execution.exit is Exit.LOST or execution.starved:
            return  # says nothing of the tests
        early = at <= len(self.tests) and not self.asked and self.stands_alone(at)
        if early and execution.exit in (Exit.CPU_LIMIT, Exit.WALL_LIMIT):
            self.fault = f"{self.place(at)} does not end within {self.cpu_seconds(at):g} s"
        elif early:
            self.fault = f"{self.place(at)} ends its process ({execution.exit}), whatever the program is"
        else:
            faults = filter(None, (self.fault_of(number, *each) for number, each in enumerate(self.results)))
            asked = any(asked for asked, _ in self.results)
            every = f"no test calls {' or '.join(self.tests.entry)}, so every program would pass"
            self.fault = next(faults, every if at == len(self.tests) + 1 and not asked else "")

    def place(self, number: int) -> str:
        return f"tests[{number - 1}]" if number else "the setup"

    def fault_of(self, number: int, asked: bool, said: list[str]) -> str:
        """What is bad in a result whatever the program is, or ""."""
        if said[0] == "not_plain" and not asked:
            return f"{self.place(number)} calls a function with values that are not plain data: {said[2]}"
        # errors that do not depend on an earlier test
        never_runs = {"SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError"}
        if said[0] == "error" and not asked and (said[1] in never_runs or self.stands_alone(number, said)):
            return f"{self.place(number)} raises {said[1]}: {said[2]}, whatever the program is"
        return ""

    def stands_alone(self, number: int, said: Sequence[str] = ()) -> bool:
        """Whether it cannot fail for lack of what an earlier call made, judged by the names that both use."""
        texts = [self.tests.setup, *self.tests.tests]
        asked = [at for at in range(number) if self.results[at][0]]
        if not asked:
            return True
        earlier = "\n".join(texts[asked[0] : number])
        if said and said[1] == "NameError" and (missing := re.match(r"name '(\w+)' is not defined", said[2])):
            known = identifiers_in("\n".join(texts[:number])) | bound(texts[number])
            return missing[1] not in known and not re.search(r"\bimport\s*\*", earlier)
        used = identifiers_in(texts[number])
        if used & identifiers_in(self.tests.setup):  # through which tests may share values
            used |= identifiers_in(self.tests.setup)
        free = set(self.tests.entry) - identifiers_in(self.tests.setup)
        only_called = {name for name in free if not re.search(rf"\bdef\s+{name}\b|\b{name}\b(?!\s*\()", earlier)}
        return not used & (identifiers_in(earlier) - only_called)


class SolutionCheck:
    """A row's solution on the row's tests."""

    def __init__(self, solution: str, tests: Tests, run_of: RunOf) -> None:
        fenced = program_in(solution)
        self.prose = fenced is None
        self.conversation = run_of(fenced or solution, tests)

    @property
    def fault(self) -> str:
        """Why it does not pass, or ""; text that is not a program proves nothing."""
        result = self.conversation.result
        failed = [at for at, outcome in enumerate(result.outcomes) if outcome is not CodeOutcome.PASSED]
        if result.lost or result.starved or not failed:
            return ""
        outcome = result.outcomes[failed[0]]
        if self.prose and outcome is CodeOutcome.SYNTAX_ERROR:
            return ""
        return f"the row's `{SOLUTION}` does not pass them: test {failed[0] + 1} of {result.count} is {outcome}"


def check_tests(sandbox: Sandbox, rows: Iterable[NamedRow], limits: Limits, run_of: RunOf) -> None:
    """Raises UserError with the names of rows whose tests cannot be read, or that no program can pass."""
    faults: list[str] = []
    checks: list[tuple[str, AssertTestCheck | SolutionCheck]] = []
    sound: list[tuple[str, Mapping[str, object], Tests]] = []
    for where, columns in rows:
        if columns.get("tests") is None:
            continue
        try:
            tests = read_tests(columns["tests"])
        except UserError as error:
            faults.append(f"{where}: {error}")
            continue
        if isinstance(tests, AssertTests):
            text = "\n".join([tests.setup, *tests.tests])
            if unnamed := next((name for name in tests.entry if not re.search(rf"\b{re.escape(name)}\b", text)), ""):
                faults.append(f"{where}: tests: no test names {unnamed}, so every program would score the same")
                continue
            checks.append((where, AssertTestCheck(tests, limits)))
        sound.append((where, columns, tests))
        solution = columns.get(SOLUTION)
        if isinstance(solution, str) and solution.strip():
            checks.append((where, SolutionCheck(solution, tests, run_of)))
    if checks:
        sandbox.converse([check.conversation for _, check in checks])
    found = {where: check.fault for where, check in reversed(checks) if check.fault}  # the first of two faults
    order = dict.fromkeys(where for where, _ in checks)
    faults += [f"{where}: tests: {found[where]}" for where in order if where in found]
    if faults:
        problem = f"{len(faults)} row(s) have tests that cannot judge any program"
        raise UserError(f"{problem}. Correct them, or remove the rows.{shown_faults(faults)}")
    warn_of_unprompted_names(sound)


def identifiers_in(text: str) -> set[str]:
    """The names in some Python, including its strings and comments."""
    return set(re.findall(r"[^\W\d]\w*", text)) - set(keyword.kwlist)


def bound(text: str) -> set[str]:
    """The names that some Python may assign to, and some more."""
    targets = re.findall(r"^(.*[^=!<>\n])?=(?!=)|\b(?:for|def|class|import|as)\b(.*)", text, re.MULTILINE)
    return identifiers_in("\n".join(part for parts in targets for part in parts))


def warn_of_unprompted_names(rows: Sequence[tuple[str, Mapping[str, object], Tests]]) -> None:
    """Warn, once, of functions that tests call but the row's prompt does not name."""
    faults = []
    for where, columns, tests in rows:
        prompt = columns.get("prompt")
        if prompt is None or columns.get(SOLUTION) or isinstance(tests, StdioTests):
            continue
        names = [tests.entry] if isinstance(tests, CallTests) else tests.entry
        named = identifiers_in(re.sub(r"\\[nrt]", " ", str(prompt)))  # of messages: as Python shows them
        faults += [f"{where}: {name}" for name in names if name not in named]
    if faults:
        problem = f"{len(faults)} function(s) are called by the tests, but the prompt does not name them"
        warnings.warn(f"reward code: {problem}. Is `entry` spelled right?{shown_faults(faults)}", stacklevel=2)


def shown_faults(faults: Sequence[str]) -> str:
    more = f"\n  and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
    return "\n  " + "\n  ".join(faults[:MOST_NAMED]) + more
