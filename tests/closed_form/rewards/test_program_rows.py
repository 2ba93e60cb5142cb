"""Rows of programs: tests that are broken themselves, layouts of others, and the problems of the package."""

import json
import warnings
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.commands.check_task import main
from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward
from posttrain.rewards.code.unit_tests import read_tests
from posttrain.rewards.grading.resources import default_resources
from posttrain.tasks.programs_task import program_row
from posttrain.tasks.row_files.rows import DatasetRow
from tests.support.refusals import refused

GOOD = {"kind": "asserts", "entry": "add", "tests": ["x = add(1, 2)", "assert x == 3"]}


def calls(**changed: object) -> dict[str, object]:
    return {"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]} | changed


@pytest.mark.parametrize(
    ("tests", "named"),
    [
        (GOOD | {"tests": "assert add(1, 2) == 3"}, "tests = 'assert add"),
        (GOOD | {"tests": [1]}, "tests[0] = 1: must be text"),
        (GOOD | {"entry": "add it"}, "entry = 'add it'"),
        (GOOD | {"entry": []}, "entry = "),
        (GOOD | {"set_up": "x = 1"}, "set_up: … `setup`"),
        (calls(cases=[{"args": "12", "expected": 3}]), "cases[0].args = '12'"),
        (calls(cases=[{"args": {"a": 1}, "expected": 3}]), "cases[0].args = "),
        (calls(cases=[{"arguments": [1], "expected": 3}]), "cases[0].arguments: … `args`"),
        (calls(cases=[{"args": [1]}]), "cases[0]: has no `expected`"),
        (calls(cases=[{"args": [1], "expected": object()}]), "cases[0].expected: a value of type object"),
        (calls(cases="no"), "cases = 'no'"),
        (calls(tolerance=float("inf")), "tolerance = inf"),
        (calls(tolerance=float("nan")), "tolerance = nan"),
        (calls(tolerance=-1), "tolerance = -1"),
        (calls(tolerance=1e30), "tolerance = 1e+30 … from 0 to 1"),
        (calls(tolerance=True), "tolerance = True"),
        ({"kind": "stdio", "cases": [{"input": "1", "output": 3}]}, "cases[0].output = 3"),
        ({"kind": "other"}, "kind"),
        ("{", "line 1"),
        (3, "kind = None"),
    ],
)
def test_malformed_tests_are_told_by_row_and_key(tests: object, named: str) -> None:
    with refused("rows.jsonl:7: tests: ", named):
        CodeReward().check_rows([("rows.jsonl:7", {"tests": tests})], default_resources())
    if isinstance(tests, dict):
        with refused("rows.jsonl:7: tests: ", named):
            program_row(DatasetRow("rows.jsonl:7", {"prompt": "p", "tests": tests}))


def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    (case,) = read_tests(calls(cases=[{"args": [np.int64(1), 2], "expected": np.array([3])}])).cases
    assert (case.arguments, case.expected) == ((1, 2), [3])
    assert type(case.arguments[0]) is int


def test_a_key_without_a_value_is_what_tables_have() -> None:
    nothing = dict.fromkeys(("args", "kwargs", "expected", "input"))
    (case,) = read_tests(calls(tolerance=None, cases=[nothing])).cases
    assert (case.arguments, case.expected) == ((), None)


@pytest.mark.parametrize(
    ("tests", "named"),
    [
        (GOOD | {"setup": "import no_such"}, "the setup raises ModuleNotFoundError"),
        (GOOD | {"setup": "x ="}, "the setup raises SyntaxError"),
        (GOOD | {"tests": ["import no_such\nassert add(1, 2) == 3"]}, "tests[0] raises ModuleNotFoundError"),
        (GOOD | {"tests": ["assert add(1, 2) == 3", "assert add(1 =="]}, "tests[1] raises SyntaxError"),
        (GOOD | {"tests": ["assert ad(1, 2) == 3"]}, "no test names add"),
        (GOOD | {"tests": ["assert ad(1, 2) == 3  # add"]}, "tests[0] raises NameError"),
        (GOOD | {"tests": ["assert 1 == 2, add"]}, "tests[0] raises AssertionError"),
        (GOOD | {"tests": ["add"]}, "no test calls add"),
        (GOOD | {"tests": ["assert add({}, object()) == 3"]}, "tests[0] calls a function with values that are not"),
        (GOOD | {"tests": ["assert add(1, 2) == 3", "assert False"]}, "tests[1] raises AssertionError"),
        (GOOD | {"tests": ["assert add(1, 2) == 3", "assert add(n, 2) == 3"]}, "tests[1] raises NameError: name 'n'"),
        (GOOD | {"tests": ["x = add(1, 2)", "import os; os._exit(0)"]}, "tests[1] ends its process"),
        (GOOD | {"setup": "import os; os._exit(0)"}, "the setup ends its process"),
        (GOOD | {"setup": "while True: pass"}, "the setup does not end"),
        (calls() | {"x": None}, ""),
        (GOOD, ""),
        (GOOD | {"tests": ["try: add()\nexcept TypeError: pass"]}, ""),
        (GOOD | {"tests": ["sum = add(1, 2)", "assert sum == 3"]}, ""),
        (GOOD | {"tests": ["add = add(1, 2)", "assert add == 3"]}, ""),
        (GOOD | {"setup": "r = []", "tests": ["r.append(add(1, 2))", "assert r == [3]"]}, ""),
        (GOOD | {"setup": "r = []", "tests": ["r.append(add(1, 2))", "for n in r: k = n\nassert k == 3"]}, ""),
        (GOOD | {"setup": "r = []\ndef seen(): return r", "tests": ["r.append(add(1, 2))", "assert seen()"]}, ""),
        (GOOD | {"setup": "r = 0\ntry: r = add(1, 2)\nexcept RuntimeError: pass", "tests": ["add()", "assert r"]}, ""),
        (GOOD | {"setup": "import os", "tests": ["x = add(1, 2)", "if 'x' not in globals(): os._exit(1)"]}, ""),
    ],
)
def test_a_row_whose_tests_no_program_can_pass_is_named(tests: object, named: str) -> None:
    rows = [("good:1", {"tests": GOOD}), ("bad:2", {"tests": tests}), ("none:3", {"tests": None})]
    reward = CodeReward(cpu_seconds=0.5)
    if not named:
        reward.check_rows(rows, default_resources())
        return
    with refused("1 row(s)", f"bad:2: tests: {named}"):
        reward.check_rows(rows, default_resources())


def test_each_test_has_the_time_that_a_run_gives_it() -> None:
    slow = "since = time.process_time()\nwhile time.process_time() < since + 0.15: pass\nassert add(1, 2) == 3"
    row = {"tests": GOOD | {"setup": "import time", "tests": [slow] * 4}, "solution": "def add(a, b): return a + b"}
    reward = CodeReward(cpu_seconds=0.4)
    reward.check_rows([("r:1", row)], default_resources())
    endless = GOOD | {"tests": ["assert add(1, 2) == 3", "while True: pass"]}
    with refused("tests[1] does not end within 0.4 s"):
        reward.check_rows([("r:1", {"tests": endless})], default_resources())


def test_a_rows_own_solution_has_to_pass() -> None:
    def row(solution: str) -> list[tuple[str, dict[str, object]]]:
        return [("r:1", {"tests": calls(), "solution": solution})]

    for right in ("def add(a, b): return a + b", "So:\n```python\ndef add(a, b): return a + b\n```", "Add them up."):
        CodeReward().check_rows(row(right), default_resources())
    with refused("r:1: tests: ", "`solution`", "test 1 of 1 is wrong"):
        CodeReward().check_rows(row("def add(a, b): return a - b"), default_resources())


def test_a_function_that_the_prompt_does_not_name_is_told_of_once() -> None:
    def row(name: str, **columns: object) -> tuple[str, dict[str, object]]:
        return f"r:{name}", {"prompt": "Write `add(a, b)`.", "tests": calls(entry=name)} | columns

    chat = [{"role": "user", "content": "Write\nad(a, b)."}]
    named = [row("add"), row("ad", prompt=chat), row("ad", solution="def ad(a, b): return a + b")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CodeReward().check_rows([*named, ("r:1", {"tests": calls(entry="ad")})], default_resources())
    with pytest.warns(UserWarning, match="the prompt does not name") as said:
        CodeReward().check_rows([*named, row("ad"), row("plus")], default_resources())
    assert len(said) == 1
    assert "r:ad: ad\n  r:plus: plus" in str(said[0].message)


def test_check_task_looks_at_rows_of_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Write add.", "tests": GOOD}))
    assert main(["code", "--rows", str(file)]) == 0
    assert "no problems in the tests of its 1 rows" in capsys.readouterr().out
    file.write_text(json.dumps({"prompt": "Write add.", "tests": GOOD | {"setup": "import no_such"}}))
    for name in ("code", "programs"):
        with refused("rows.jsonl:1: tests: the setup raises ModuleNotFoundError"):
            main([name, "--rows", str(file)])


ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (files("posttrain") / "assets" / "programs.jsonl").read_text("utf-8").splitlines()
]


def outcomes(sources: Sequence[str], tests: Sequence[Any], *, reward: CodeReward) -> list[str]:
    completions = [f"```python\n{source}\n```" for source in sources]
    found = reward(completions=completions, finish_reasons=["stop"] * len(sources), tests=tests)
    return [str(getattr(one, "outcome", one)) for one in found]


def outcomes_of_rows(sources: Sequence[str]) -> list[str]:
    return outcomes(sources, [row["tests"] for row in ROWS], reward=CodeReward(cpu_seconds=0.15))


def test_there_are_enough_of_every_kind_with_names_of_their_own() -> None:
    assert len(ROWS) >= 30
    assert len({row["id"] for row in ROWS}) == len({row["prompt"] for row in ROWS}) == len(ROWS)
    kinds = [row["tests"]["kind"] for row in ROWS]
    assert all(kinds.count(kind) >= 8 for kind in ("stdio", "calls", "asserts"))


def test_each_is_solved_by_its_solution() -> None:
    assert outcomes_of_rows([row["solution"] for row in ROWS]) == [CodeOutcome.PASSED] * len(ROWS)


def constant(row: dict[str, Any]) -> str:
    """The right answer to a row's first test, whatever is asked."""
    tests = row["tests"]
    if tests["kind"] == "stdio":
        return f"print({tests['cases'][0]['output']!r}, end='')"
    if tests["kind"] == "calls":
        return f"def {tests['entry']}(*args):\n    return {tests['cases'][0]['expected']!r}"
    names = [tests["entry"]] if isinstance(tests["entry"], str) else tests["entry"]
    return "\n".join(f"def {name}(*args):\n    return None" for name in names)


@pytest.mark.parametrize("cheat", ["empty", "constant", "endless"])
def test_none_is_solved_by_a_cheap_guess(cheat: str) -> None:
    sources = {"empty": "pass", "endless": "while True: pass"}
    programs = [sources.get(cheat) or constant(row) for row in ROWS]
    assert CodeOutcome.PASSED not in outcomes_of_rows(programs)


ADD = "def add(a, b):\n    return a + b\n"
PRINTS = "a, b = map(int, input().split())\nprint(a + b)\n"

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "our_own": ({"prompt": "Add.", "tests": {"kind": "stdio", "cases": [{"input": "1 2", "output": "3"}]}}, PRINTS),
    "our_own_as_text": ({"prompt": "Add.", "tests": json.dumps(calls())}, ADD),
    "human_eval": (
        {
            "task_id": "X/0",
            "prompt": 'def add(a, b):\n    """Add."""\n',
            "entry_point": "add",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n",
            "canonical_solution": "    return a + b\n",
        },
        ADD,
    ),
    "mbpp": (
        {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert sorted([add(1, 1)]) == [2]"]},
        ADD,
    ),
    "mbpp_with_imports": (
        {"prompt": "Add.", "test_imports": ["import math"], "test_list": ["assert math.isclose(add(0.1, 0.2), 0.3)"]},
        ADD,
    ),
    "apps_stdio": ({"question": "Add.", "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})}, PRINTS),
    "apps_lines": ({"question": "Add.", "input_output": {"inputs": [["1 2"]], "outputs": [["3"]]}}, PRINTS),
    "apps_calls": (
        {"question": "Add.", "input_output": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}},
        ADD,
    ),
    "contest": (
        {
            "description": "Add.",
            "public_tests": {"input": ["1 2"], "output": ["3"]},
            "private_tests": {"input": ["3 4"], "output": ["7"]},
            "generated_tests": {"input": [], "output": []},
        },
        PRINTS,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_and_its_problem_can_be_solved_and_failed(name: str) -> None:
    columns, solution = LAYOUTS[name]
    row = program_row(DatasetRow("here:1", columns))
    assert isinstance(row.columns["prompt"], str)
    sources, tests = (solution, "def add(a, b): return -1"), [row.columns["tests"]] * 2
    assert outcomes(sources, tests, reward=CodeReward(cpu_seconds=0.5)) == [CodeOutcome.PASSED, CodeOutcome.WRONG]
    # What the tests were made of is gone: a reward sees it once.
    assert not {"test", "test_list", "input_output", "public_tests"} & set(row.columns)


def test_a_function_that_only_asserts_name_is_named_in_the_prompt() -> None:
    row = program_row(DatasetRow("here:1", LAYOUTS["mbpp"][0]))
    assert "`add`" in str(row.columns["prompt"])


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": "Add."}, "none of tests"),
        ({"prompt": "Add.", "tests": {"kind": "stdio", "cases": []}}, "tests = []"),
        ({"prompt": "Add.", "tests": {"kind": "odd"}}, "odd"),
        ({"prompt": "Add.", "tests": "not json"}, "JSONDecodeError"),
        ({"text": "Add.", "test_list": ["assert add(1) == 1", "assert sub(1) == 1"]}, "no one function"),
        ({"question": "Add.", "input_output": {"inputs": ["1"], "outputs": []}}, "shorter"),
    ],
)
def test_a_row_in_no_layout_is_named_with_its_place(columns: dict[str, Any], says: str) -> None:
    with refused(f"here:7 … {says}"):
        program_row(DatasetRow("here:7", columns))
