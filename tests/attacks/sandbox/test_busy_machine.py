"""Limits by the clock on a busy machine.  How long a process waited for a processor is injected, never measured."""

import sys
import time
from collections.abc import Sequence

import pytest

from posttrain.rewards.code import unit_test_runs
from posttrain.rewards.code.code_reward import CodeReward, course_graded
from posttrain.rewards.code.function_questions import SandboxFunction, Unanswered, sandbox_answers
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.math_reward import Question, slowly
from posttrain.sandbox import backends, sandboxed_process
from posttrain.sandbox.backends import Container
from posttrain.sandbox.elsewhere import ReplayRun
from posttrain.sandbox.execution import Execution, Exit, Limits
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.sandboxed_process import ProcessWaits
from tests.support.code_cheats import ALL, RIGHT
from tests.support.refusals import mentions
from tests.support.sandboxes import scored


def slow(seconds: float) -> str:
    """A right program that takes this long by the clock for each test, and no processor."""
    return RIGHT.replace("    return", f"    import time; time.sleep({seconds})\n    return")


def graded(reward: CodeReward, sources: list[str], tests: object) -> list[tuple[float | None, str]]:
    found = scored(reward, sources, tests)
    return [(one.score, str(one.outcome)) if isinstance(one, Graded) else (None, str(one)) for one in found]


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process may take .3 s by the clock, but for what it waited; the sandbox was probed before."""
    scored(CodeReward(), [RIGHT], ALL["calls"])
    monkeypatch.setattr(Limits, "wall_seconds", property(lambda self: min(0.3, self.most_seconds)))


def machine(monkeypatch: pytest.MonkeyPatch, *, busy: bool) -> None:
    """All that a process does not compute it waits for a processor; or nothing of it."""
    monkeypatch.setattr(sandboxed_process, "PATIENCE", 1000.0)
    monkeypatch.setattr(unit_test_runs, "PATIENCE", 1000.0)
    began = time.monotonic()
    waits = (lambda pid: {"1": time.monotonic() - began}) if busy else (lambda pid: {"1": 0.0})
    monkeypatch.setattr(sandboxed_process, "thread_waits", waits)


@pytest.mark.parametrize("kind", ALL)
def test_a_program_that_starves_twice_is_a_failure_and_never_a_0(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, busy=True)
    monkeypatch.setattr(sandboxed_process, "PATIENCE", 2.0)
    ((score, said),) = graded(CodeReward(cpu_seconds=1.0), [slow(60)], ALL[kind])
    assert score is None
    mentions(said, "waited too long for a processor", "sandbox.at_once")


@pytest.mark.parametrize("kind", ALL)
def test_time_that_a_program_waits_for_a_processor_is_not_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, busy=True)
    assert graded(CodeReward(cpu_seconds=1.0), [slow(0.5)], ALL[kind]) == [(1.0, "passed")]


@pytest.mark.parametrize("kind", ALL)
def test_a_program_that_sleeps_on_an_idle_machine_is_at_fault(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, busy=False)
    assert graded(CodeReward(cpu_seconds=1.0), [slow(60)], ALL[kind]) == [(0.0, "time_limit")]


@pytest.mark.parametrize(("busy", "verdict"), [(False, (0.0, "program_limit")), (True, (1.0, "passed"))])
def test_the_limit_of_a_program_is_held_alike(busy, verdict, monkeypatch) -> None:
    machine(monkeypatch, busy=busy)
    monkeypatch.setattr(Limits, "wall_seconds", property(lambda self: self.most_seconds))
    # Three tests of .2 s each, of which none is too long: too long together, unless all of it was waiting.
    reward = CodeReward(cpu_seconds=0.3, program_seconds=0.35)
    assert graded(reward, [slow(0.2)], ALL["calls"]) == [verdict]


@pytest.mark.parametrize("kind", ALL)
def test_the_limit_of_a_whole_program_keeps_its_name_where_we_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, busy=False)
    monkeypatch.setattr(unit_test_runs, "waited_here", time.monotonic)  # all of our time
    reward = CodeReward(cpu_seconds=0.25, program_seconds=0.25)
    assert graded(reward, [slow(60)], ALL[kind]) == [(0.0, "program_limit")]


def test_the_limit_of_one_run_keeps_its_name_where_the_programs_ends_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, busy=False)
    reward = CodeReward(cpu_seconds=0.25, program_seconds=0.3001)
    assert graded(reward, [slow(60)], ALL["stdio"]) == [(0.0, "time_limit")]


def test_a_comparison_that_had_no_processor_is_a_failure_and_the_next_ones_are_answered() -> None:
    # A stand-in for sympy, which never sleeps: what it takes by the clock and does not compute, it waited.
    function = SandboxFunction("compare", "import time\ndef compare(n):\n    time.sleep(n)\n    return 'same'")
    with ProcessPool() as pool:
        said = sandbox_answers(pool, function, [[60], [0]], cpu_seconds=1.0)
    assert said == [Unanswered.LOST, "same"]
    starved, same = (slowly(one, Question("1/2", "x")) for one in said)
    assert isinstance(starved, ScoringFailure)
    assert same.score == 1.0


def test_a_block_whose_compiler_starved_is_no_broken_block() -> None:
    ended = {"status": 9, "stdout": b"", "stderr": b"", "cpu_seconds": 0.1, "wall_seconds": 9, "memory_bytes": 0}
    starved = Execution(exit=Exit.WALL_LIMIT, compiled=False, starved=True, **ended)
    assert isinstance(course_graded(starved), ScoringFailure)


def test_waits_of_threads_add_up_to_the_time_that_passed_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{"1": 1.0, "2": 3.0}, {"1": 1.5, "3": 2.0}, {"1": 1.5, "4": 50.0}, None])
    monkeypatch.setattr(sandboxed_process, "thread_waits", lambda pid: next(seen))
    waits, totals = ProcessWaits(), []
    for passed in (4.0, 7.0, 9.0, 20.0):
        waits.look(1, waits.began + passed)
        totals.append(waits.total)
    # The longest of each look: 3, then 2 more, then 50 more but for the clock; of a process that ended, nothing new.
    assert totals == [3.0, 5.0, 9.0, 9.0]


@pytest.mark.parametrize("busy", [False, True])
def test_elsewhere_the_pressure_on_the_machine_decides(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(Container):
        """Stands for a container: only the machine as a whole can be seen."""

        start_seconds = 0.3

        def command(self, run: ReplayRun, arguments: Sequence[str], passed: Sequence[int]) -> list[str]:
            return [sys.executable, *arguments]

        def removed(self, run: ReplayRun) -> None: ...

    began = time.monotonic()
    monkeypatch.setattr(sandboxed_process, "pressure_seconds", lambda: time.monotonic() - began if busy else 0.0)
    monkeypatch.setattr(backends, "PATIENCE", 1.5)
    run = ReplayRun(text="import time; time.sleep(60)", stdin=b"", limits=Limits(), mark="0")
    ended = Here("docker", "image").run(run)
    assert (ended.exit, ended.starved) == (Exit.WALL_LIMIT, busy)
