"""Right programs are paid, however they read, end and answer; programs that pass without solving anything are not."""

import itertools

import pytest

from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.grading.function import ScoringFailure
from tests.support.code_cheats import ALL, ASSERTS, CALLS, CHEATS, RIGHT, STDIO
from tests.support.honest_programs import ENDINGS, READINGS, RESULTS, STATEMENTS
from tests.support.sandboxes import graded, outcomes, scored

SUM = {"kind": "stdio", "cases": [{"input": "19 23\n", "output": "42\n"}, {"input": "-1 1\n", "output": "0\n"}]}


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], tuple[float | None, str]]:
    """Each way of reading with one of ending, and each of ending with two of reading."""
    readings, endings = list(READINGS), list(ENDINGS)
    pairs = list(dict.fromkeys([*itertools.product(readings, endings[:2]), *itertools.product(readings[:2], endings)]))
    sources = [f"{READINGS[reading]}\n{ENDINGS[ending]}" for reading, ending in pairs]
    return dict(zip(pairs, graded(CodeReward(), sources, SUM), strict=True))


def test_every_way_of_reading_and_of_ending_passes(verdicts: dict[tuple[str, str], tuple[float | None, str]]) -> None:
    assert {pair: said for pair, said in verdicts.items() if said != (1.0, "passed")} == {}
    assert len(verdicts) == 2 * len(READINGS) + 2 * len(ENDINGS) - 4


def test_the_same_programs_pass_nothing_where_they_are_wrong() -> None:
    sources = [f"{READINGS['input']}\n{ending}".replace("a + b", "a - b - 1") for ending in ENDINGS.values()]
    assert {said for said, _ in graded(CodeReward(), sources, SUM)} == {0.0}


def test_input_longer_than_a_pipe_is_read_by_its_size() -> None:
    numbers = list(range(5000))
    tests = {"kind": "stdio", "cases": [{"input": " ".join(map(str, numbers)), "output": str(sum(numbers))}]}
    source = "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))"
    assert graded(CodeReward(), [source], tests) == [(1.0, "passed")]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_counts_as_the_plain_value_that_it_is(name: str) -> None:
    source, expected = RESULTS[name]
    tests = {"kind": "calls", "entry": "f", "cases": [{"expected": expected}]}
    wrong = {"kind": "calls", "entry": "f", "cases": [{"expected": "something else"}]}
    assert graded(CodeReward(), [source], tests) == [(1.0, "passed")]
    assert graded(CodeReward(), [source], wrong) == [(0.0, "wrong")]


def test_results_of_numpy_count_as_python_has_them() -> None:
    results: dict[str, object] = {"np.int64(3)": 3, "[np.float64(3)]": [3], "np.array([[1, 2]])": [[1, 2]]}
    results |= {"np.float32(.5)": 0.5, "np.array(3)": 3, "np.bool_(True)": True, "(np.array([1]), 2)": [[1], 2]}
    for result, expected in results.items():
        tests = {"kind": "calls", "entry": "f", "cases": [{"expected": expected}]}
        source = f"import numpy as np\ndef f(): return {result}"
        assert graded(CodeReward(modules=("numpy",)), [source], tests) == [(1.0, "passed")], result


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_about_results_hold(name: str) -> None:
    source, statement = STATEMENTS[name]
    tests = {"kind": "asserts", "entry": "f", "tests": [statement]}
    assert graded(CodeReward(), [source], tests) == [(1.0, "passed")]
    ((score, _),) = graded(CodeReward(), ["def f(): return object()"], tests)
    assert score == 0.0


LIARS = {
    "list": "class L(list):\n    def __iter__(self): return iter([1])\n    def __eq__(self, o): return True\n"
    "def f(): return L()",
    "dict": "class D(dict):\n    def items(self): return {1: 1}.items()\n    def __eq__(self, o): return True\n"
    "def f(): return D()",
    "int": "class I(int):\n    def __index__(self): return 1\n    def __eq__(self, o): return True\n"
    "def f(): return I()",
    "str": "class S(str):\n    def __str__(self): return '1'\n    def __eq__(self, o): return True\n"
    "def f(): return S()",
    "class": "class O:\n    __class__ = int\n    def __index__(self): return 1\ndef f(): return O()",
}


@pytest.mark.parametrize("name", LIARS)
def test_what_a_subclass_says_of_itself_counts_for_nothing(name: str) -> None:
    expected = {"list": [1], "dict": {"1": 1}, "int": 1, "str": "1", "class": 1}[name]
    tests = {"kind": "calls", "entry": "f", "cases": [{"expected": expected}]}
    ((score, _),) = graded(CodeReward(), [LIARS[name]], tests)
    assert score == 0.0


@pytest.mark.parametrize(
    "printed",
    ["1\\x0b2\\x0c3", "1\\u20282\\u20283", "1\\x1c2\\x1d3", "1\\x852\\x853", "1\\r2\\r3", "1\\xa0\\n2\\xa0\\n3"],
)
def test_nothing_but_a_line_feed_ends_a_line(printed: str) -> None:
    tests = {"kind": "stdio", "cases": [{"input": "", "output": "1\n2\n3\n"}]}
    found = scored(CodeReward(), [f"print('{printed}')", "print('1 \\n2\\t\\r\\n3\\n\\n')"], tests)
    assert outcomes(found) == [(0.0, "wrong"), (1.0, "passed")]


def test_a_program_that_sleeps_in_every_test_is_ended_as_a_whole() -> None:
    sleeps = "import time\ntime.sleep(0.4)\ndef f():\n    time.sleep(0.4)\n    return 1\nprint(1)"
    kinds: list[dict[str, object]] = [
        {"kind": "stdio", "cases": [{"input": "", "output": "1"}] * 20},
        {"kind": "calls", "entry": "f", "cases": [{"expected": 1}] * 20},
        {"kind": "asserts", "entry": "f", "tests": ["assert f() == 1"] * 20},
    ]
    reward = CodeReward(score="fraction", cpu_seconds=1.0, program_seconds=1.5)
    for tests in kinds:
        ((score, outcome),) = graded(reward, [sleeps], tests)
        assert (outcome, score < 0.5) == (CodeOutcome.PROGRAM_LIMIT, True), tests["kind"]


def test_a_program_of_too_many_characters_has_a_name() -> None:
    ((score, outcome),) = graded(CodeReward(), ["x = 1\n" * 20_000], SUM)
    assert (score, outcome) == (0.0, "too_long")


FAST = CodeReward(cpu_seconds=0.3)


def verdict(source: str, tests: object, reward: CodeReward = FAST) -> Graded | ScoringFailure:
    return scored(reward, [source], tests)[0]


@pytest.mark.parametrize("kind", ALL)
def test_a_right_program_passes(kind: str) -> None:
    assert verdict(RIGHT, ALL[kind]) == Graded(1.0, CodeOutcome.PASSED)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing(name: str, kind: str) -> None:
    found = verdict(CHEATS[name], ALL[kind])
    assert isinstance(found, Graded), found
    assert found.score == 0.0
    # and the sandbox goes on as if nothing had been
    assert verdict(RIGHT, ALL[kind]) == Graded(1.0, CodeOutcome.PASSED)


def test_each_way_to_fail_has_a_name() -> None:
    programs = {
        CodeOutcome.WRONG: "def add(a, b): return 0",
        CodeOutcome.RAISED: "def add(a, b): return 1 / 0",
        CodeOutcome.TIME_LIMIT: "def add(a, b):\n    while True: pass",
        CodeOutcome.NOT_PLAIN: "def add(a, b): return object()",
        CodeOutcome.SYNTAX_ERROR: "def",
    }
    texts = [f"```python\n{source}\n```" for source in programs.values()] + ["nothing", "nothing", RIGHT]
    reasons, tests = ["stop"] * len(programs) + ["stop", "length", "stop"], [CALLS] * (len(programs) + 2) + [None]
    found = FAST(completions=texts, finish_reasons=reasons, tests=tests)
    others = (CodeOutcome.NO_CODE, CodeOutcome.TRUNCATED, CodeOutcome.NOT_TESTED)
    assert [name for _, name in outcomes(found)] == [*programs, *others]
    assert found[-1] == (None, CodeOutcome.NOT_TESTED)


def test_output_beyond_its_limit_has_a_name_and_errors_beyond_theirs_do_no_harm() -> None:
    assert verdict("while True: print('x' * 9999)", STDIO) == Graded(0.0, CodeOutcome.OUTPUT_LIMIT)
    noisy = "import sys\nsys.stderr.write('x' * 300_000)\n" + RIGHT
    for tests in ALL.values():
        assert verdict(noisy, tests) == Graded(1.0, CodeOutcome.PASSED)


def test_a_share_of_the_tests_and_credit_for_what_compiles() -> None:
    sometimes = "def add(a, b):\n    if a > 9: raise ValueError\n    while a < 0: pass\n    return a + b"
    share = CodeReward(score="fraction", cpu_seconds=0.3)
    for tests in (CALLS, ASSERTS):
        assert verdict(sometimes, tests, share) == Graded(pytest.approx(1 / 3), CodeOutcome.RAISED)
    credit = CodeReward(syntax_credit=0.1, cpu_seconds=0.3)
    assert verdict("x = 1", CALLS, credit).score == 0.1
    assert verdict("x =", CALLS, credit).score == 0.0
    assert verdict("raise SyntaxError", CALLS, credit).score == 0.1
