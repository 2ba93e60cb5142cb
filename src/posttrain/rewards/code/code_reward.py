"""Rewards for programs: run in the sandbox against a row's tests.

**What is run.**  The last closed Python fence or `<code>…</code>` outside of `<think>`, else the last fence without a
language (posttrain.rewards.parsing.tags), on the row's `tests` (posttrain.rewards.code.unit_tests).  A row without
tests is not scored; one whose tests no program can pass is rejected before training.

**What earns what.**  `code` gives 1 if every test passes, else 0; with `score: fraction` the share of tests that
pass; with `syntax_credit` that much to a program that compiles and passes nothing.  `code_course` runs nothing: 1 for a
`<code>` block that Python can parse, .3 for one that it cannot, 0 for a text with a few words that could do harm.

**Known hacks, and what stops them.**  Reading the expected values: they never enter the program's process.  A result
that equals everything: only plain values cross, each of an exact type.  Ending early with status 0: a test passes by
what was printed or returned, never by the exit status.  Tests found in memory and rewritten: they run in another
process.  Printing every possible answer: outputs are compared whole.  A slow machine: verdicts use processor time.
Not stopped: a program that knows the expected outputs by heart because the prompt shows them (hide them), and whatever
the tests do not test.  `code_course` pays for `<code>0</code>`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from posttrain.errors import require
from posttrain.options.bounds import Bounded
from posttrain.rewards.code.function_questions import answered_together
from posttrain.rewards.code.row_checks import NamedRow, check_tests
from posttrain.rewards.code.unit_test_runs import RUN_KINDS, CodeOutcome, ProgramResult, UnitTestRun
from posttrain.rewards.code.unit_tests import Tests, read_tests
from posttrain.rewards.grading.answers import Column, DetailedGrade, Graded, Texts
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, SessionReward
from posttrain.rewards.parsing.tags import CODE, END_CODE, MAX_CHARACTERS, Fences, program_in
from posttrain.sandbox.execution import Execution, Exit, Limits, Process
from posttrain.sandbox.sandboxes import Sandboxes

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
    """Imported in the sandbox besides the most used of the standard library: programs cannot read modules from disk."""
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
