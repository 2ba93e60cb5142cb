"""A function of a module or in workers scores as one in a file here does; what may not run there is refused by name."""

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.binding import digest_of
from posttrain.config import Config
from posttrain.config.recipes import full_form
from posttrain.errors import RunError
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.grade import grade, reward_function
from posttrain.rewards.grading.resources import default_resources
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.named_inputs import named_files
from tests.support.refusals import refused
from tests.support.reward_rows import CHAT, group
from tests.support.timing import takes
from tests.support.worker_rows import function_of, told

FUNCTIONS = """
import asyncio, enum, fractions, json, sys, zlib
from posttrain.errors import RunError
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.answers import Graded

class How(enum.StrEnum):
    SHORT = "short"
    LONG = "long"

def digest(value):
    return zlib.crc32(json.dumps(value, default=str).encode())

def everything(**columns):
    lists = [(k, v) for k, v in sorted(columns.items()) if k not in ("trainer_state", "log_extra", "log_metric")]
    return [digest([[k, v[i]] for k, v in lists]) for i in range(len(columns["prompts"]))]

def compares(prompts, completions):
    most = {}
    for prompt, text in zip(prompts, completions):
        most[prompt] = max(most.get(prompt, 0), len(text))
    return [len(text) / most[prompt] for prompt, text in zip(prompts, completions)]

def one(response, ground_truth, numbers, finish_reason, prompt):
    return digest([response, ground_truth, numbers, finish_reason, prompt])

def says(response, ground_truth):
    return response == ground_truth

def kinds(completions, numbers):
    return [[type(x).__name__ for x in given] == ["int", "float", "bool", "NoneType", "str", "tuple"] and
            given[5] == (1, {2: "two", "2": [3]}) for given in numbers]

async def later(completions):
    await asyncio.sleep(0.001)
    return [len(text) for text in completions]

class Later:
    async def __call__(self, response):
        await asyncio.sleep(0.001)
        return Graded(None if response == "a" else 0.1, How.SHORT if len(response) < 2 else How.LONG)

later_one = Later()

def numbers_of_all_kinds(response):
    return {"a": True, "bb": fractions.Fraction(1, 3), "ccc": None, "d": 10**20}[response]

def graded(completions):
    return (Graded(0.1 * len(text), How.LONG) if len(text) > 1 else None for text in completions)

def arrays(completions):
    import numpy
    return numpy.array([len(text) for text in completions], dtype=numpy.float32)

def wrong_length(completions):
    return [1.0]

def single(completions):
    return 1.0

def text(completions):
    return [1.0] + ["good"] * (len(completions) - 1)

def not_finite(response):
    return float("nan") if response == "bb" else 1.0

def too_large(response):
    return 10**400 if response == "bb" else 1.0

def raises(completions):
    return [1 / (text != "bb") for text in completions]

async def raises_later(response):
    return 1 / (response != "bb")

def fails(completions):
    raise ScoringFailure("error 500")

def fails_for_one(completions):
    return [ScoringFailure("error 500") if text == "bb" else 1.0 for text in completions]

def stops(response):
    raise RunError("no key: set one")

def heavy(response):
    return bool({"torch", "numpy", "transformers"} & set(sys.modules))

def prints(response):
    print("garbage" * 1000)
    sys.stdout.flush()
    return 1.0
"""
WORKING = ["everything", "compares", "one", "says", "kinds", "later", "later_one", "numbers_of_all_kinds", "graded"]
FAILING = ["wrong_length", "single", "text", "not_finite", "too_large", "raises", "raises_later", "fails", "stops"]
NUMBERS = [1, 1.5, True, None, "é\ud800\n", (1, {2: "two", "2": [3]})]


def rows(**chat: Any) -> list[Any]:
    columns = {"answer": "bb", "numbers": NUMBERS, "withheld": {"a": [1.0]}}
    return [
        group(["a", "bb"], columns=columns, **chat),
        group(["ccc", "d"], id="q", columns=columns | {"answer": "d"}, prefill="<think>" if not chat else ""),
    ]


@pytest.mark.parametrize("name", [*WORKING, "arrays", "prints"])
@pytest.mark.parametrize("chat", [{}, {"messages": CHAT}], ids=["plain", "chat"])
def test_a_function_in_workers_scores_as_it_does_here(tmp_path: Path, name: str, chat: dict[str, Any]) -> None:
    here = function_of(tmp_path, FUNCTIONS, name)
    there = function_of(tmp_path, FUNCTIONS, name, workers=2)
    if name in ("compares", "numbers_of_all_kinds"):  # their keys are texts
        chat, groups = {}, [group(["a", "bb", "ccc", "d"])]
    else:
        groups = rows(**chat)
    expected = told(groups, here)
    assert not isinstance(expected, str), expected
    assert told(groups, there) == expected


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("on_error", ["stop", "none"])
def test_what_goes_wrong_in_a_worker_is_told_as_if_it_had_gone_wrong_here(tmp_path, name, on_error) -> None:
    groups = [group(["a", "bb", "ccc"])]
    here = told(groups, function_of(tmp_path, FUNCTIONS, name), on_error=on_error)
    there = told(groups, function_of(tmp_path, FUNCTIONS, name, workers=2), on_error=on_error)
    assert there == here
    assert isinstance(here, str) or here[2] > 0  # it did go wrong


def test_a_score_that_a_worker_could_not_get_is_tried_again_and_left_out(tmp_path: Path) -> None:
    groups = [group(["a"] * 19 + ["bb"])]
    assert told(groups, function_of(tmp_path, FUNCTIONS, "fails_for_one", workers=1))[2] == 1


def test_an_exception_in_a_worker_keeps_its_traceback(tmp_path: Path) -> None:
    function = function_of(tmp_path, FUNCTIONS, "raises", workers=1)
    with refused("sample 1", "ZeroDivisionError: division by zero", error=RunError) as caught:
        grade([group(["a", "bb"])], [function])
    assert type(caught.value.__cause__).__name__ == "ZeroDivisionError"
    assert 'return [1 / (text != "bb")' in caught.value.__cause__.__notes__[0]


def test_a_function_of_lists_is_never_asked_about_part_of_a_prompts_completions(tmp_path: Path) -> None:
    sizes = "[len(completions) + 100 * len(set(prompts))] * len(completions)"
    source = f"def mine(completions, prompts):\n    return {sizes}\n"
    groups = [group(["x"] * 3) for _ in range(5)]
    for workers, seconds in ((1, 0.0), (2, 0.0), (3, 9.0)):
        function = function_of(tmp_path, source, workers=workers, item_seconds=seconds)
        assert grade(groups, [function]).scores.unique().tolist() == [103.0]


def test_workers_keep_what_they_have_loaded_from_step_to_step_and_load_nothing_heavy(tmp_path: Path) -> None:
    source = "import os\n\ndef mine(response):\n    return os.getpid()\n"
    function = function_of(tmp_path, source, workers=2)
    groups = [group(["a", "b", "c", "d"])]
    first, second = (set(grade(groups, [function]).scores.flatten().tolist()) for _ in range(2))
    assert len(first | second) <= 2
    assert grade(groups, [function_of(tmp_path, FUNCTIONS, "heavy", workers=1)]).scores.sum() == 0


def test_one_function_under_two_names_has_workers_for_each(tmp_path: Path) -> None:
    source = "import time\n\ndef mine(response):\n    time.sleep(0.01)\n    return float(response)\n"
    function = function_of(tmp_path, source, workers=2)
    both = [function, replace(function, name="again", settings=replace(function.settings, weight=10.0))]
    assert grade([group([str(n) for n in range(8)])], both).rewards.tolist() == [[11.0 * n for n in range(8)]]


def test_a_reward_in_workers_may_look_at_another_and_wait_behind_a_gate(tmp_path: Path) -> None:
    source = "def mine(completions, base):\n    return [10 * each for each in base]\n"
    function = function_of(tmp_path, source, workers=1, of="length", gate="length")
    length = reward_function(lambda completions: [len(text) for text in completions], name="length", weight=0)
    assert grade([group(["", "bb"])], [function, length]).scores[0].tolist() == [[0.0, 20.0]]


def test_a_module_level_function_given_in_python_runs_in_workers_too(tmp_path, monkeypatch) -> None:
    source = "import os\n\nclass Kept:\n    @staticmethod\n    def own(response):\n        return os.getpid()\n"
    (tmp_path / "rewards_by_name.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    function = reward_function(importlib.import_module("rewards_by_name").Kept.own, workers=1)
    assert grade([group(["a"])], [function]).scores.item() != os.getpid()


def test_a_column_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    function = function_of(tmp_path, "def mine(completions, when):\n    return [0.0]\n", workers=1)
    with refused("'mine'", "'when'", "set", "`workers`"):
        grade([group(["a"], columns={"when": {1}})], [function])
    with refused("'when'"):
        grade([group(["a"], columns={"when": 10**5000})], [function])


def test_a_file_that_changes_during_a_run_is_not_taken_up_by_the_next_worker(tmp_path: Path) -> None:
    function = function_of(tmp_path, "def mine(response):\n    return 1.0\n", workers=1)
    grade([group(["a"])], [function])
    (tmp_path / "my_rewards.py").write_text("def mine(response):\n    return 2.0\n")
    assert grade([group(["a"])], [function]).scores.item() == 1.0  # the worker that runs has the old one
    default_resources().close()
    with refused("my_rewards.py", "`mine`", error=RunError):
        grade([group(["a"])], [function])


def test_a_file_that_loads_here_and_not_in_a_worker_stops_the_run(tmp_path: Path) -> None:
    source = "import sys\nassert 'torch' in sys.modules, 'only here'\n\ndef mine(response):\n    return 1.0\n"
    with refused("'mine'", "AssertionError: only here", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, source, workers=1)])
    ends = "import os, sys\nif 'torch' not in sys.modules:\n    os._exit(3)\n\ndef mine(response):\n    return 1.0\n"
    with refused("exited with 3", "my_rewards.py", error=RunError):
        grade([group(["a"])], [function_of(tmp_path, ends, workers=1)])


def test_a_call_to_a_worker_costs_little(tmp_path: Path) -> None:
    """It takes about 0.2 ms; a poll that sleeps between looks, or a process for each call, would take 10 and more."""
    function = function_of(tmp_path, "def mine(response):\n    return 1.0\n", workers=1)
    groups = [group(["a"] * 500)]
    grade(groups, [function])
    with takes(most=500 * 0.01):
        grade(groups, [function])


PACKAGE = "rewards_of_a_test"
PLACED = """
from functools import partial

def solved(completions, worth=1.0, **columns):
    return [worth * (text == "yes") for text in completions]

class Later:
    async def __call__(self, completions):
        return solved(completions)

later, half, NUMBER = Later(), partial(solved, worth=0.5), 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the working folder, which nothing else finds."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import solved as outside\n")
    (folder / "inner.py").write_text(PLACED)
    (folder / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    default_resources().close()


@pytest.mark.parametrize(
    ("function", "worth"), [("inner:solved", 1.0), ("inner:later", 1.0), ("inner:half", 0.5), ("outside", 1.0)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_functions_and_objects_of_a_module_score_here_and_in_workers(package, function, worth, workers) -> None:
    path = f"{PACKAGE}.{function}" if ":" in function else f"{PACKAGE}:{function}"
    reward = load_reward(RewardOptions(path=path, workers=workers))
    assert reward.name == function.rpartition(":")[2]
    assert grade([group(["yes", "no"])], [reward]).rewards.tolist() == [[worth, 0.0]]
    if function != "half":  # of a partial's function only the module is known that names it, which is the same here
        assert reward.source.digest == digest_of(package / "inner.py")


def test_a_recipe_and_a_flag_name_it_as_they_name_a_file(package: Path) -> None:
    assert full_form("rewards", [f"{PACKAGE}.inner:solved=0.5"]) == [{"path": f"{PACKAGE}.inner:solved", "weight": 0.5}]
    config = Config(rewards=(RewardOptions(path=f"{PACKAGE}.inner:solved"),))
    named = named_files(config)["rewards[0].path"]
    assert named.digest == digest_of(package / "inner.py")
    (package / "inner.py").write_text(PLACED + "\n# another\n")
    assert named.differs(named_files(config)["rewards[0].path"])  # a resumed run is told


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"{PACKAGE}.inner:solve", "inner has no function `solve`.  Did you mean `solved`?"),
        (f"{PACKAGE}.inner:NUMBER", "`NUMBER` in … inner is a int and cannot score completions"),
        (f"{PACKAGE}.inner:Later", "`Later` in … is a type and cannot score"),
        (f"{PACKAGE}.outer:solved", "cannot be imported: ModuleNotFoundError … Python looks in the folder you run in"),
        ("no_such_package_at_all.inner:solved", "Python looks in the folder you run in and in installed packages"),
        (f"{PACKAGE}.broken:solved", "No module named 'no_such_module_anywhere'"),
        (f"{PACKAGE}/inner:solved", "must be FILE.py:FUNCTION or package.module:FUNCTION"),
        (f"{PACKAGE}..inner:solved", "or package.module:FUNCTION"),
        (":solved", "or package.module:FUNCTION"),
    ],
)
def test_what_cannot_be_found_is_one_clear_message(package: Path, path: str, says: str) -> None:
    with refused(says):
        load_reward(RewardOptions(path=path))
