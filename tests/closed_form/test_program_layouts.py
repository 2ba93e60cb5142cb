"""Programming problems in the layouts that others use, and what is refused."""

import json
from typing import Any

import pytest

from posttrain.rewards.code.code_reward import CodeOutcome, CodeReward
from posttrain.tasks.programs_task import program_row
from posttrain.tasks.row_files.rows import DatasetRow
from tests.support.refusals import refused

ADD = "def add(a, b):\n    return a + b\n"
PRINTS = "a, b = map(int, input().split())\nprint(a + b)\n"

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "our_own": ({"prompt": "Add.", "tests": {"kind": "stdio", "cases": [{"input": "1 2", "output": "3"}]}}, PRINTS),
    "our_own_as_text": (
        {
            "prompt": "Add.",
            "tests": json.dumps({"kind": "calls", "entry": "add", "cases": [{"args": [1, 2], "expected": 3}]}),
        },
        ADD,
    ),
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
        {
            "prompt": "Add two numbers.",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(add(0.1, 0.2), 0.3)"],
        },
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
    found = CodeReward(cpu_seconds=0.5)(
        completions=[f"```python\n{source}\n```" for source in (solution, "def add(a, b): return -1")],
        finish_reasons=["stop"] * 2,
        tests=[row.columns["tests"]] * 2,
    )
    assert [getattr(one, "outcome", one) for one in found] == [CodeOutcome.PASSED, CodeOutcome.WRONG]
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
