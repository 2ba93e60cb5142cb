"""Programming problems: prompts and hidden tests from a local file, in any of the usual layouts.

**What the prompt looks like.**  The problem, with a line that asks for one fenced block of Python.

**What earns what.**  posttrain.rewards.code.code_reward: a program that passes all tests of its row, in the sandbox.

**Which problems are trained on.**  As in posttrain.tasks.dataset: whole rows are held out, by a hash of the prompt.

**Layouts.**  A row's columns say which it is:

- our own: `prompt`, `tests`;
- HumanEval: `prompt` (the start of a function), `entry_point`, `test` (a function `check` of asserts);
- MBPP: `text` or `prompt`, `test_list`, and `test_setup_code` or `test_imports`;
- APPS, TACO: `question` or `prompt`, `input_output` (JSON with `inputs`, `outputs`, and `fn_name` where a function is
  asked for);
- CodeContests: `description`, and `public_tests`, `private_tests`, `generated_tests`, each with `input` and `output`.

**Known hacks.**  Those of posttrain.rewards.code.code_reward.  Tests that are shown in a prompt can be learned by
heart.
"""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from posttrain.errors import UserError
from posttrain.options.dataset import BUNDLED_PROGRAMS, DatasetOptions
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.code.unit_tests import read_tests
from posttrain.rewards.grading.function import RewardFunction
from posttrain.schemas import PARSING
from posttrain.tasks.dataset import DatasetTask
from posttrain.tasks.row_files.rows import DatasetRow

ASKED_FOR = "\n\nGive the whole program in one block that begins with ```python and ends with ```."


class ProgramsTask(DatasetTask):
    """Rows of programming problems."""

    name = "programs"
    reward_functions: tuple[RewardFunction, ...] = (
        RewardFunction(name="code", call=CodeReward(), text_only=True, bounded=True),
    )

    def resolved(self, options: DatasetOptions) -> DatasetOptions:
        bundled = str(files("posttrain") / "assets" / "programs.jsonl")
        path = bundled if options.path == BUNDLED_PROGRAMS else options.path
        return replace(options, path=path, prompt_column="prompt")

    def prepared(self, row: DatasetRow) -> DatasetRow:
        row = program_row(row)
        prompt = row.columns["prompt"]
        if not isinstance(prompt, str):
            raise UserError(f"{row.where}: a programming problem must be text, not {type(prompt).__name__}")
        return DatasetRow(row.where, {**row.columns, "prompt": prompt + ASKED_FOR})


QUESTIONS = ("prompt", "question", "text", "description")
SPLITS = ("public_tests", "private_tests", "generated_tests")


def program_row(row: DatasetRow) -> DatasetRow:
    """The row with `prompt` and `tests` in place of the columns that they are made of."""
    columns = row.columns
    try:
        prompt, tests = read_layout(columns)
        read_tests(tests)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"{row.where}: not in a known layout (posttrain.tasks.programs_task): {fault}") from error
    used = {*QUESTIONS, *SPLITS, "tests", "test", "test_list", "test_setup_code", "test_imports", "input_output"}
    kept = {name: value for name, value in columns.items() if name not in used}
    return DatasetRow(row.where, {**kept, "prompt": prompt, "tests": tests})


def read_layout(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Prompt and tests of a row in any of the layouts."""
    question = next((columns[name] for name in QUESTIONS if columns.get(name)), None)
    if question is None:
        raise KeyError(f"no text in any of {', '.join(QUESTIONS)}")
    if "tests" in columns:
        tests = columns["tests"]
        return question, json.loads(tests) if isinstance(tests, str) else dict(tests)
    if "entry_point" in columns:
        entry, start = columns["entry_point"], columns["prompt"].rstrip()
        prompt = f"Complete this Python function and give the whole of it.\n\n```python\n{start}\n```"
        return prompt, {"kind": "asserts", "entry": entry, "setup": columns["test"], "tests": [f"check({entry})"]}
    if "test_list" in columns:
        tests = list(columns["test_list"])
        entry = called_name(tests)  # the name is only in the asserts, so the prompt says it
        setup = columns.get("test_setup_code") or columns.get("test_imports") or ""
        lines = setup if isinstance(setup, str) else "\n".join(setup)
        prompt = f"{question}\nThe function is called `{entry}`."
        return prompt, {"kind": "asserts", "entry": entry, "setup": lines, "tests": tests}
    if "input_output" in columns:
        given = columns["input_output"]
        return question, input_output(json.loads(given) if isinstance(given, str) else given)
    splits = [columns[split] for split in SPLITS if columns.get(split)]
    if any(split in columns for split in SPLITS):  # together: what is hidden from the prompt is hidden already
        pairs = [pair for split in splits for pair in zip(split["input"], split["output"], strict=True)]
        return question, {"kind": "stdio", "cases": [{"input": given, "output": wanted} for given, wanted in pairs]}
    raise KeyError("none of tests, entry_point, test_list, input_output, public_tests among the columns")


def called_name(tests: Sequence[str]) -> str:
    """The one function that all of the asserts call."""
    found = []
    for test in tests:
        with PARSING:
            nodes = [*ast.walk(ast.parse(test))]
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        found.append({function.id for function in calls if isinstance(function, ast.Name)})
    common = set.intersection(*found) - set(dir(builtins)) - {"isclose"}
    if len(common) != 1:
        raise ValueError(f"the asserts call {', '.join(sorted(common)) or 'no one function'} in common")
    return common.pop()


def input_output(given: Mapping[str, Any]) -> dict[str, Any]:
    """Standard input and output, or arguments and results."""
    pairs = list(zip(given["inputs"], given["outputs"], strict=True))
    if given.get("fn_name"):
        cases = [{"args": list(arguments), "expected": expected} for arguments, expected in pairs]
        return {"kind": "calls", "entry": given["fn_name"], "cases": cases}
    return {
        "kind": "stdio",
        "cases": [{"input": joined_lines(given), "output": joined_lines(wanted)} for given, wanted in pairs],
    }


def joined_lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) + "\n"
