"""docs/rewards.md and docs/alarms.md: blocks run, commands print what is shown, tables are those of the code."""

import dataclasses
import importlib
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from posttrain.generation.parity import BFLOAT16_NATS, EXACT_NATS
from posttrain.options.reward import RewardOptions, RewardTerms
from posttrain.options.sandbox import SandboxOptions
from posttrain.records import Marks
from posttrain.rewards.code.unit_tests import read_tests
from posttrain.rewards.grading.function import TrainerState
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.reward_registry import BUILT_IN, load_reward
from posttrain.runs import alarms
from posttrain.runs.rollout_file import grade_columns
from posttrain.runs.watchers import STEPS_APART
from posttrain.training.metrics import logged_metrics
from tests.support.commands import printed
from tests.support.pages import blocks, posttrain, programs, python, write_files
from tests.support.reward_rows import group

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "rewards.md").read_text(encoding="utf-8")
ALARMS = (DOCS / "alarms.md").read_text(encoding="utf-8")
BLOCKS = blocks(PAGE)
COMMANDS = [text for language, _, text in BLOCKS if language == "console"]
TIMES = re.compile(r"\s+[\d.]+ ms\s+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the page gives, under the names it gives them."""
    folder = tmp_path_factory.mktemp("rewards")
    write_files(BLOCKS, folder)
    return folder


def test_the_python_blocks_run(folder: Path) -> None:
    assert programs(BLOCKS)
    for program in programs(BLOCKS):
        done = python(program, folder)
        assert done.code == 0, done.err
    assert (folder / "runs/sums/model/model.safetensors").is_file()


@pytest.mark.parametrize("block", [block for block in COMMANDS if "check-task" in block])
def test_check_task_prints_what_is_shown(block: str, folder: Path) -> None:
    command, *shown = block.splitlines()
    done = posttrain(shlex.split(command)[2:], folder)
    said = [TIMES.sub("  ", line) for line in done.out.splitlines()]
    assert all(TIMES.sub("  ", line) in said for line in shown if line != "...")
    assert done.code == int("are not as they should be" in block)


@pytest.mark.parametrize("block", [block for block in COMMANDS if "check-task" not in block])
def test_a_training_command_resolves_to_a_config(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    printed("config", *(word for word in shlex.split(block)[3:] if word != "--dry-run"))


@pytest.mark.parametrize("name", [name for language, name, _ in BLOCKS if language == "yaml"])
def test_a_recipe_is_one(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    printed("config", "countdown-tiny", name)


def test_the_function_that_logs_does_so_under_the_names_that_the_page_gives(folder: Path) -> None:
    brief = load_reward(RewardOptions(path=f"{folder}/logged_rewards.py:brief"))
    groups, state = [group(["one two", "one"])], TrainerState(global_step=5, max_steps=10)
    grades = grade(groups, [brief], trainer_state=state)
    assert grades.scores.tolist() == [[[0.0, 1.0]]]  # in the second half of a run one word alone
    assert grade(groups, [brief], trainer_state=replace(state, global_step=4)).scores.tolist() == [[[1.0, 1.0]]]
    assert grade_columns(grades, grades.rewards)["extra/brief/words"] == [2, 1]
    assert logged_metrics(grades.logged) == {"logged/brief/mean_words": 1.5}
    assert "`extra/<function>/<column>`" in PAGE
    assert "`logged/<function>/<name>`" in PAGE


def test_the_functions_that_mark_steps_mark_what_the_page_says(folder: Path) -> None:
    sums = load_reward(RewardOptions(path=f"{folder}/stepwise_rewards.py:sums"))
    first = load_reward(RewardOptions(path=f"{folder}/stepwise_rewards.py:first_token"))
    grades = grade([group(["so 3+4=7, 1+1=3", "none"])], [sums, first])
    assert grades.scores.tolist() == [[[0.0, 0.0]]] * 2
    assert grades.marks["sums"] == ((Marks(spans=((3, 8, 0.1), (10, 15, -0.1))), None),)
    assert grades.marks["first_token"] == ((Marks(tokens=(0.1, None)), Marks(tokens=(0.1, None))),)


def test_the_tests_of_programs_are_read() -> None:
    (text,) = (text for _, name, text in BLOCKS if name == "tests.jsonl")
    assert [type(read_tests(line)).__name__ for line in text.splitlines()] == ["StdioTests", "CallTests", "AssertTests"]


def options_of(name: str) -> list[str]:
    """The options of a built-in reward."""
    module, _, function = BUILT_IN[name].partition(":")
    call = getattr(importlib.import_module(module), function)
    return [each.name for each in dataclasses.fields(call)] if dataclasses.is_dataclass(call) else []


def test_the_table_of_rewards_is_that_of_the_code() -> None:
    section = PAGE.partition("## Built in")[2].partition("###")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    told = {name: re.findall(r"`(\w+)`", options) for names, options in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == {name: options_of(name) for name in BUILT_IN}


def test_the_table_of_terms_is_that_of_the_code() -> None:
    section = PAGE.partition("## Several rewards")[2].partition("## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert told == {each.name for each in dataclasses.fields(RewardTerms)}
    assert told <= {each.name for each in dataclasses.fields(RewardOptions)}


def test_every_kind_of_sandbox_has_its_words() -> None:
    (kinds,) = (each.type for each in dataclasses.fields(SandboxOptions) if each.name == "kind")
    assert all(f"`sandbox.kind: {kind}`" in PAGE for kind in get_args(kinds))


def test_the_table_of_alarms_says_the_thresholds_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `([\w -]+?)(?: <.*?)?` \| (.*?) \|", ALARMS, flags=re.MULTILINE))
    says = {
        "reward alone": [f"over {['', 'one', 'two', 'three', 'four', 'five'][alarms.HALF]} steps", "a quarter"],
        "outcome": [f"last {alarms.RECENT} steps", f"{100 * alarms.OUTCOME_JUMP:g} points", f"{alarms.WINDOW} before"],
        "held-out": [f"{alarms.HALF} before"],
        "length": [
            f"{alarms.LENGTH_FACTOR} times",
            f"over {alarms.RECENT} steps {alarms.DRIFT_FACTOR:g} times",
            f"{100 * alarms.CLIPPED_JUMP:g} points",
            f"first {alarms.HALF} steps",
        ],
        "repetition": ["half of all 4-grams", f"{100 * alarms.REPETITION_JUMP:g} points"],
        "unscored": ["no completion of the step"],
        "same reward": ["since the first step"],
        "sampler gap": [f"{EXACT_NATS:g} nats", f"{BFLOAT16_NATS:g} in bfloat16", "three such steps"],
        "critic": [
            f"in {alarms.WINDOW} steps in a row",
            "explained variance",
            f"below {alarms.LITTLE_EXPLAINED:g}".replace("0.", "."),
        ],
        "no signal": [f"{alarms.WINDOW} steps", f"{100 * alarms.SILENT_GROUPS:g} %"],
        "effective sample size": ["less than half"],
    }
    assert rows.keys() == says.keys()
    assert STEPS_APART == 3
    for name, parts in says.items():
        assert all(part in rows[name] for part in parts), name
    assert (alarms.LEAST_RISE, alarms.REPETITION) == (0.25, 0.5)  # a quarter, and half
    assert f"again after {alarms.AGAIN_AFTER} steps" in ALARMS
