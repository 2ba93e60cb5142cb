"""Rewards for programs: run in the sandbox against a row's tests.

The program of a completion (posttrain.rewards.parsing.tags) runs on the row's `tests`
(posttrain.rewards.code.unit_tests).  A row without tests is not scored.  `code_course` runs nothing: 1 for a `<code>`
block that Python can parse, .3 for one that it cannot, 0 for a text with a few words that could do harm.

**Checks before training.**  Broken tests would score all programs 0.  Tests that are Python run once against a function
that raises at every call: a test that fails before its first call would fail for every program.  A reference program in
the column `solution` has to pass.

**Known hacks, and what stops them.**  Reading the expected values: they never enter the program's process.  A result
that equals everything: only plain values cross, each of an exact type.  Ending early with status 0: a test passes by
what was printed or returned, never by the exit status.  Tests found in memory and rewritten: they run in another
process.  Printing every possible answer: outputs are compared whole.  A slow machine: verdicts use processor time.
Not stopped: a program that knows the expected outputs by heart because the prompt shows them (hide them), and whatever
the tests do not test.  `code_course` pays for `<code>0</code>`.
"""

import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from posttrain.errors import UserError, require
from posttrain.options.bounds import Bounded
from posttrain.rewards.code.function_questions import answered_together
from posttrain.rewards.code.unit_test_runs import RUN_KINDS, CodeOutcome, ProgramResult, UnitTestRun
from posttrain.rewards.code.unit_tests import AssertTests, CallTests, StdioTests, Tests, read_tests
from posttrain.rewards.grading.answers import Column, DetailedGrade, Graded, Texts
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, SessionReward
from posttrain.rewards.parsing.tags import CODE, END_CODE, MAX_CHARACTERS, Fences, program_in
from posttrain.sandbox.execution import Conversation, Execution, Exit, Limits, Process, Sandbox, StartedProcess
from posttrain.sandbox.sandboxes import Sandboxes

NamedRow = tuple[str, Mapping[str, object]]
RunOf = Callable[[str, Tests], UnitTestRun]
SOLUTION = "solution"
MOST_NAMED = 5


class AssertTestCheck:
    """Runs setup and tests without a program, and notes what fails by itself."""

    def __init__(self, tests: AssertTests, limits: Limits) -> None:
        self.tests, self.limits = tests, limits
        self.results: list[tuple[bool, list[str]]] = []
        """For the setup and then each test: whether it called the function, and its result."""
        self.asked = False
        self.fault = ""

    def begin(self, sandbox: Sandbox) -> None:
        names = {"entry": self.tests.entry, "setup": self.tests.setup, "tests": ["pass", *self.tests.cases]}
        limits = replace(self.limits, cpu_seconds=self.cpu_seconds(0))
        sandbox.start(self, Process(kind="tests", source=json.dumps(names), limits=limits))

    def cpu_seconds(self, number: int) -> float:
        # the setup and the first test share theirs, as in a run
        return self.limits.cpu_seconds * (len(self.tests.cases) + 1 if number < 2 else 1)

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
        early = at <= len(self.tests.cases) and not self.asked and self.stands_alone(at)
        if early and execution.exit in (Exit.CPU_LIMIT, Exit.WALL_LIMIT):
            self.fault = f"{self.place(at)} does not end within {self.cpu_seconds(at):g} s"
        elif early:
            self.fault = f"{self.place(at)} ends its process ({execution.exit}), whatever the program is"
        else:
            faults = filter(None, (self.fault_of(number, *each) for number, each in enumerate(self.results)))
            asked = any(asked for asked, _ in self.results)
            every = f"no test calls {' or '.join(self.tests.entry)}, so every program would pass"
            self.fault = next(faults, every if at == len(self.tests.cases) + 1 and not asked else "")

    def place(self, number: int) -> str:
        return f"tests[{number - 1}]" if number else "the setup"

    def fault_of(self, number: int, asked: bool, said: list[str]) -> str:
        if said[0] == "not_plain" and not asked:
            return f"{self.place(number)} calls a function with values that are not plain data: {said[2]}"
        # errors that do not depend on an earlier test
        never_runs = {"SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError"}
        if said[0] == "error" and not asked and (said[1] in never_runs or self.stands_alone(number, said)):
            return f"{self.place(number)} raises {said[1]}: {said[2]}, whatever the program is"
        return ""

    def stands_alone(self, number: int, said: Sequence[str] = ()) -> bool:
        """Whether it cannot fail for lack of what an earlier call made, judged by the names that both use."""
        texts = [self.tests.setup, *self.tests.cases]
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


def solution_fault(result: ProgramResult, *, prose: bool) -> str:
    """Why a row's solution does not pass its tests, or ""; `prose`, text that is not a program, proves nothing."""
    failed = [at for at, outcome in enumerate(result.outcomes) if outcome is not CodeOutcome.PASSED]
    if result.lost or result.starved or not failed:
        return ""
    outcome = result.outcomes[failed[0]]
    if prose and outcome is CodeOutcome.SYNTAX_ERROR:
        return ""
    return f"the row's `{SOLUTION}` does not pass them: test {failed[0] + 1} of {result.count} is {outcome}"


def check_tests(sandbox: Sandbox, rows: Iterable[NamedRow], limits: Limits, run_of: RunOf) -> None:
    """Raises UserError with the names of rows whose tests cannot be read, or that no program can pass."""
    faults: list[str] = []
    checks: list[tuple[str, Conversation, Callable[[], str]]] = []
    """Rows with what to run in the sandbox, and what it then says."""
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
            text = "\n".join([tests.setup, *tests.cases])
            if unnamed := next((name for name in tests.entry if not re.search(rf"\b{re.escape(name)}\b", text)), ""):
                faults.append(f"{where}: tests: no test names {unnamed}, so every program would score the same")
                continue
            check = AssertTestCheck(tests, limits)
            checks.append((where, check, partial(getattr, check, "fault")))
        sound.append((where, columns, tests))
        solution = columns.get(SOLUTION)
        if isinstance(solution, str) and solution.strip():
            fenced = program_in(solution)
            run = run_of(fenced or solution, tests)
            checks.append((where, run, partial(solution_fault, run.result, prose=fenced is None)))
    if checks:
        sandbox.converse([conversation for _, conversation, _ in checks])
    found: dict[str, str] = {}
    for where, _, fault in checks:  # the first of two faults
        found[where] = found.get(where) or fault()
    faults += [f"{where}: tests: {fault}" for where, fault in found.items() if fault]
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


LOST = "the sandbox lost a process that it was running"
STARVED = (
    "a program waited too long for a processor, twice: this machine is too busy. Run fewer programs at once"
    " (sandbox.at_once), or stop other programs here"
)


@dataclass(frozen=True, kw_only=True)
class CodeReward(Bounded, SessionReward):
    """Reward function: programs against their rows' tests."""

    score: Literal["binary", "fraction"] = "binary"
    """binary: all tests or nothing, stopping at the first failure; fraction: the share of tests that pass."""
    syntax_credit: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Score of a program that compiles and passes no test; it can be earned without solving anything."""
    cpu_seconds: Annotated[float, Gt(0), Le(3600)] = 2.0
    """Processor time for one test."""
    program_seconds: float = 60.0
    """By the clock, for all tests of a program together: a sleeping program uses no processor time."""
    memory_mib: Annotated[int, Ge(16)] = 512
    """Address space of a process beyond the interpreter's."""
    modules: tuple[str, ...] = ()
    """Also imported in the sandbox, with the most used of the standard library: programs cannot read modules from
    disk."""
    fences: Fences = "any"
    """any: the last fence without a language counts if none names Python and there is no `<code>`; python: never."""
    rows_stand_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.cpu_seconds <= self.program_seconds <= 24 * 3600
        require(holds, self, "program_seconds", f"must be from cpu_seconds = {self.cpu_seconds} to {24 * 3600}")

    def check_rows(self, rows: Sequence[NamedRow], resources: Resources) -> None:
        if any(columns.get("tests") is not None for _, columns in rows):
            run_of = partial(self.run_of, stop_at_failure=True)
            check_tests(resources.sandboxes.importing(self.modules), rows, self.limits(), run_of)

    def scores(
        self, resources: Resources, /, *, completions: Texts, finish_reasons: Texts, tests: Column, **_columns: object
    ) -> list[Graded | ScoringFailure]:
        read = {id(column): None if column is None else read_tests(column) for column in tests}  # a group has one
        rows = zip(completions, finish_reasons, tests, strict=True)
        found = [self.prepared(text, finish == "length", read[id(column)]) for text, finish, column in rows]
        return answered_together(found, UnitTestRun, partial(self.judged, resources.sandboxes))

    def prepared(self, text: str, cut_off: bool, tests: Tests | None) -> Graded | UnitTestRun:
        """A program ready to run, or the verdict if there is nothing to run."""
        if tests is None:
            return Graded(None, CodeOutcome.NOT_TESTED)
        source = program_in(text, self.fences)
        if source is None:
            return Graded(0.0, CodeOutcome.TRUNCATED if cut_off else CodeOutcome.NO_CODE)
        if len(source) > MAX_CHARACTERS:
            return Graded(0.0, CodeOutcome.TOO_LONG)
        return self.run_of(source, tests, stop_at_failure=self.score == "binary")

    def run_of(self, source: str, tests: Tests, *, stop_at_failure: bool) -> UnitTestRun:
        return RUN_KINDS[type(tests)](source, tests, self.limits(), stop_at_failure=stop_at_failure)

    def limits(self) -> Limits:
        return Limits(
            cpu_seconds=self.cpu_seconds, memory_bytes=self.memory_mib << 20, most_seconds=self.program_seconds
        )

    def judged(self, sandboxes: Sandboxes, judgings: Sequence[UnitTestRun]) -> list[Graded | ScoringFailure]:
        """Run them all; programs that waited too long for a processor run again, one at a time."""
        sandbox = sandboxes.importing(self.modules)
        sandbox.converse(judgings)
        finished = []
        for judging in judgings:
            if judging.result.starved:
                judging = self.run_of(judging.source, judging.tests, stop_at_failure=judging.result.stop_at_failure)
                sandbox.converse([judging])
            finished.append(self.graded(judging.result))
        return finished

    def graded(self, result: ProgramResult) -> Graded | ScoringFailure:
        if result.lost or result.starved:
            return ScoringFailure(LOST if result.lost else STARVED)
        assert result.complete, result
        assert result.count > 0, result
        tests = zip(result.outcomes, result.cpu_seconds, strict=True)
        details = {
            "tests": [{"outcome": str(outcome), "cpu_seconds": round(seconds, 4)} for outcome, seconds in tests],
            "memory_bytes": result.memory_bytes,
        }
        failed = [outcome for outcome in result.outcomes if outcome is not CodeOutcome.PASSED]
        if not failed:
            return DetailedGrade(1.0, CodeOutcome.PASSED, details)
        score = (result.count - len(failed)) / result.count if self.score == "fraction" else 0.0
        return DetailedGrade(max(score, self.syntax_credit if result.compiled else 0.0), failed[0], details)


UNWANTED = ("import os", "import sys", "import subprocess", "eval(", "exec(", "open(")


class CourseOutcome(StrEnum):
    """What the course's reward saw."""

    PARSES = "parses"
    BROKEN = "broken"
    UNWANTED = "unwanted"
    NO_CODE = "no_code"


@dataclass(frozen=True)
class CourseReward(SessionReward):
    """Reward function: the course's variant, which rewards a tagged block of Python whatever it does."""

    def scores(
        self, resources: Resources, /, *, completions: Texts, **_columns: object
    ) -> list[Graded | ScoringFailure]:
        def parsed(asked: list[Process]) -> Iterable[Graded | ScoringFailure]:
            return map(course_graded, resources.sandboxes.importing().run(asked))

        return answered_together([self.question(text) for text in completions], Process, parsed)

    def question(self, text: str) -> Graded | Process:
        """The check of what is between the first `<code>` and the `</code>` after it, or the verdict without one."""
        _, opened, rest = text.partition(CODE)
        source, closed, _ = rest.partition(END_CODE)
        if not (opened and closed):
            return Graded(0.0, CourseOutcome.NO_CODE)
        if any(word in source.strip() for word in UNWANTED):
            return Graded(0.0, CourseOutcome.UNWANTED)
        return Process(kind="syntax", source=source.strip())


def course_graded(execution: Execution) -> Graded | ScoringFailure:
    if execution.exit is Exit.LOST or execution.starved:
        return ScoringFailure(STARVED if execution.starved else LOST)
    return Graded(1.0, CourseOutcome.PARSES) if execution.compiled else Graded(0.3, CourseOutcome.BROKEN)


code_course = CourseReward()
