"""Programs that try to pass without solving anything: none does, in any of the three kinds of tests."""

from collections.abc import Sequence

import pytest

from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from tests.support.code_cheats import ALL, ASSERTS, CALLS, CHEATS, RIGHT, STDIO

FAST = CodeReward(cpu_seconds=0.3)


def graded(source: str, tests: object, reward: CodeReward = FAST) -> Graded | ScoringFailure:
    (found,) = reward(completions=[f"```python\n{source}\n```"], finish_reasons=["stop"], tests=[tests])
    return found


@pytest.mark.parametrize("kind", ALL)
def test_a_right_program_passes(kind: str) -> None:
    assert graded(RIGHT, ALL[kind]) == Graded(1.0, CodeOutcome.PASSED)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing(name: str, kind: str) -> None:
    found = graded(CHEATS[name], ALL[kind])
    assert isinstance(found, Graded), found
    assert found.score == 0.0
    # and the sandbox goes on as if nothing had been
    assert graded(RIGHT, ALL[kind]) == Graded(1.0, CodeOutcome.PASSED)


def outcomes(found: Sequence[Graded | ScoringFailure]) -> list[str]:
    return [str(one.outcome) if isinstance(one, Graded) else "failure" for one in found]


def test_each_way_to_fail_has_a_name() -> None:
    programs = {
        CodeOutcome.WRONG: "def add(a, b): return 0",
        CodeOutcome.RAISED: "def add(a, b): return 1 / 0",
        CodeOutcome.TIME_LIMIT: "def add(a, b):\n    while True: pass",
        CodeOutcome.NOT_PLAIN: "def add(a, b): return object()",
        CodeOutcome.SYNTAX_ERROR: "def",
    }
    texts = [f"```python\n{source}\n```" for source in programs.values()] + ["nothing", "nothing", RIGHT]
    found = FAST(
        completions=texts,
        finish_reasons=["stop"] * len(programs) + ["stop", "length", "stop"],
        tests=[CALLS] * (len(programs) + 2) + [None],
    )
    assert outcomes(found) == [*programs, CodeOutcome.NO_CODE, CodeOutcome.TRUNCATED, CodeOutcome.NOT_TESTED]
    assert found[-1] == (None, CodeOutcome.NOT_TESTED)


def test_output_beyond_its_limit_has_a_name_and_errors_beyond_theirs_do_no_harm() -> None:
    assert graded("while True: print('x' * 9999)", STDIO) == Graded(0.0, CodeOutcome.OUTPUT_LIMIT)
    noisy = "import sys\nsys.stderr.write('x' * 300_000)\n" + RIGHT
    for tests in ALL.values():
        assert graded(noisy, tests) == Graded(1.0, CodeOutcome.PASSED)


def test_a_share_of_the_tests_and_credit_for_what_compiles() -> None:
    sometimes = (
        "def add(a, b):\n    if a > 9: raise ValueError\n    if a < 0:\n        while True: pass\n    return a + b"
    )
    share = CodeReward(score="fraction", cpu_seconds=0.3)
    for tests in (CALLS, ASSERTS):
        assert graded(sometimes, tests, share) == Graded(pytest.approx(1 / 3), CodeOutcome.RAISED)
    credit = CodeReward(syntax_credit=0.1, cpu_seconds=0.3)
    assert graded("x = 1", CALLS, credit).score == 0.1
    assert graded("x =", CALLS, credit).score == 0.0
    assert graded("raise SyntaxError", CALLS, credit).score == 0.1
