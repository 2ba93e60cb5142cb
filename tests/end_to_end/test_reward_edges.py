"""Code of a user with which a run could not go on: rewards that score nothing or change their process, and exits."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import posttrain
from posttrain.cli import main
from posttrain.errors import RunError
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.rewards.grading.calls import GIVEN, Call, list_arguments
from posttrain.rewards.grading.function import keywords, reward_function
from posttrain.rewards.shaping import Blocklist
from posttrain.trl.rewards import DecodedReward
from tests.support.commands import called, printed
from tests.support.own_objects import Sums, config, config_for, policy_of
from tests.support.refusals import mentions, refused
from tests.support.runs import metrics_of, records, tiny_recipe
from tests.support.tiny import weights


def nothing(completions: Sequence[str]) -> list[None]:
    return [None for _ in completions]


def broken(completions: Sequence[str]) -> list[float]:
    raise ZeroDivisionError


def always(completions: Sequence[str]) -> list[float]:
    return [1.0 for _ in completions]


def by_letters(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(len(set(text))) for text in completions]


def trained(model: Path, folder: Path, reward: Any, num_steps: int = 1, *, again: bool = False, **sections: Any) -> Any:
    """The run, and the policy that it trained."""
    policy = policy_of(model)
    told = config(folder, num_steps, checkpoint={"every_steps": 1}, **sections)
    how = {"resume": again, "accept_changes": again}
    return posttrain.train(told, policy=policy, task=Sums(policy), rewards=[reward], **how), policy


def alarms_of(folder: Path) -> list[tuple[int, str]]:
    lines = records(folder / "alarms.jsonl")
    return [(line["step"], line["alarm"]) for line in lines]


@pytest.mark.parametrize("reward", [nothing, broken])
def test_a_reward_that_never_scores_is_told_at_once_and_ends_the_run(reward: Any, model: Path, tmp_path: Path) -> None:
    sections = {"grading": {"max_unscored_steps": 3}, "rollout": {"on_reward_error": "none"}}
    with refused("step 3: ", "--accept-changes", "accept_changes=True", "max_unscored_steps = 3", error=RunError):
        trained(model, tmp_path, reward, 5, **sections)
    assert (1, "unscored") in alarms_of(tmp_path)
    assert [line["frac_unscored"] for line in metrics_of(tmp_path)[1:]] == [1.0] * 3
    # The step is taken again by a run that is resumed, whose reward is mended.
    trained(model, tmp_path, always, 4, again=True, **sections)
    assert [line["frac_unscored"] for line in metrics_of(tmp_path)[1:]] == [1.0, 1.0, 0.0, 0.0]


def test_without_a_limit_a_run_goes_on_and_a_score_resets_the_count(model: Path, tmp_path: Path) -> None:
    trained(model, tmp_path / "off", nothing, 3, grading={"max_unscored_steps": 0})
    steps: list[int] = []

    def every_third(completions: Sequence[str]) -> list[float | None]:
        steps.extend([1] * (len(completions) == 12))  # not an evaluation
        return [0.5 if len(steps) % 3 == 0 else None for _ in completions]

    trained(model, tmp_path / "on", every_third, 6, grading={"max_unscored_steps": 3})


def test_a_reward_that_stays_the_same_is_an_alarm_and_ends_the_run(model: Path, tmp_path: Path) -> None:
    sections = {"grading": {"max_same_reward_steps": 3}}
    with refused("step 3: ", "grading.max_same_reward_steps = 3", error=RunError):
        trained(model, tmp_path / "constant", always, 5, **sections)
    trained(model, tmp_path / "off", always, 4, grading={"max_same_reward_steps": 0})
    assert alarms_of(tmp_path / "off")[0] == (1, "same reward")
    batches: list[int] = []

    def once(completions: Sequence[str]) -> list[float]:
        batches.append(len(completions))
        return [float(batches.count(12) == 1 and number == 0) for number in range(len(completions))]

    trained(model, tmp_path / "once", once, 4, **sections)  # a difference, once, is something learned


def changing_torch(completions: Sequence[str], **columns: object) -> list[float]:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return by_letters(completions)


def test_what_a_reward_switches_off_in_torch_is_switched_on_again(model: Path, tmp_path: Path) -> None:
    plain, changing = (
        weights(trained(model, tmp_path / each.__name__, each)[1]) for each in (by_letters, changing_torch)
    )
    assert torch.equal(changing, plain)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)


def test_a_reward_that_changes_the_working_folder_changes_no_file_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def wanders(completions: Sequence[str]) -> list[float]:
        os.chdir(tmp_path / "there")
        return by_letters(completions)

    run, _ = trained(model, Path("runs/one"), wanders, 2)
    assert run.folder == tmp_path / "here" / "runs" / "one"
    assert {"summary.json", "model", "rollouts", "checkpoints"} <= {each.name for each in run.folder.iterdir()}
    assert list((tmp_path / "there").iterdir()) == []
    assert f"run folder   {run.folder}" in capsys.readouterr().out.replace("\n", "")
    monkeypatch.chdir(tmp_path / "here")
    trained(model, Path("runs/two"), always)
    assert "run folder   runs/two" in capsys.readouterr().out


def huge(completions: Sequence[str], **columns: object) -> list[float]:
    return [1e308 if len(text) % 2 else -1e308 for text in completions]


def huge_metric(completions: Sequence[str], log_metric: Callable[..., None], **columns: object) -> list[float]:
    log_metric("size", 1e308)
    return by_letters(completions)


@pytest.mark.parametrize("reward", [huge, huge_metric])
def test_numbers_that_cannot_be_averaged_are_refused_by_reward(reward: Any, model: Path, tmp_path: Path) -> None:
    with refused(f"reward '{reward.__name__}'", "1e+308, too large", error=RunError):
        trained(model, tmp_path / "run", reward)


def test_the_arguments_that_hide_columns_are_all_that_a_function_is_given_beside_them() -> None:
    function = reward_function(by_letters)
    call = Call(function=function, rows=(), wanted=keywords(function))
    assert set(GIVEN) == {*list_arguments((), function), "trainer_state", *call.log.arguments()}


def test_a_column_called_self_reaches_objects_that_take_all_columns() -> None:
    """Ours, and what `posttrain.trl` puts around a function."""
    told: dict[str, object] = {}
    around = DecodedReward(lambda **columns: told.update(columns) or [1.0], new_tokenizer(), lambda: None)
    assert Blocklist(phrases=("b",))(completions=["a"], self=[1]) == [0.0]
    assert (around(completion_ids=[[5]], self=[1]), told["self"]) == ([1.0], [1])


def test_columns_that_rewards_do_not_see_are_named_at_the_start(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    columns = '"completions": "x", "trainer_state": 1'
    rows.write_text("".join(f'{{"prompt": "a{n}", {columns}, "self": {n}}}\n' for n in range(20)))
    recipe = tiny_recipe(tmp_path / "place", model={"path": str(model)}, run={"num_steps": 1})
    said = printed("rl", recipe, "--task.name", "dataset", "--task.path", rows, "--task.held-out-share", 0)
    assert "rewards do not see the columns completions, trainer_state of the rows" in said
    assert "{own_completions: completions}" in said
    assert metrics_of(tmp_path / "place" / "run")[1]["reward"] >= 0


@pytest.mark.parametrize("side", ["rows", "held_out_rows"])
def test_columns_whose_names_stand_for_what_is_sampled_are_named_in_the_note_and_in_the_error(
    side: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asking(completions: Sequence[str], completion: Sequence[str]) -> list[float]:
        return [0.0 for _ in completion]

    rows = {"rows": [{"question": "a"}], "held_out_rows": [{"question": "b"}]}
    rows[side] = [{"question": "c", "prompt": "d", "completion": "e"}]
    made = config_for(
        model,
        tmp_path / "run",
        task={"prompt_column": "question"},
        rollout={"prompts_per_step": 1, "group_size": 2, "max_completion_tokens": 2},
        evaluation={"samples": 1},
        run={"num_steps": 0, "curves": False},
    )
    posttrain.train(made, **rows, rewards=[by_letters])
    assert "rewards do not see the columns prompt, completion of the rows, whose names" in capsys.readouterr().out
    if side == "rows":
        with refused("needs an argument 'completion'", "The column `completion`"):
            posttrain.train(replace(made, run=replace(made.run, overwrite=True)), **rows, rewards=[asking])


@pytest.mark.parametrize(
    ("body", "says"),
    [("sys.exit(0)", "raised SystemExit: 0"), ("sys.stdout.close()", "'mine': closed the standard output")],
)
def test_a_reward_that_ends_the_program_is_an_error(
    body: str, says: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    recipe = tiny_recipe(tmp_path / "place", model={"path": str(model)}, run={"num_steps": 1})
    mine = recipe.with_name("mine.py")
    mine.write_text(f"import sys\n\ndef mine(completions, **columns):\n    {body}\n    return []\n")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["rl", str(recipe), "--rewards", f"{mine}:mine"]) == 1
    assert says in capsys.readouterr().err


CODE = """
import sys
{at_import}
from dataclasses import replace
from posttrain.algorithms.table import grpo
from posttrain.tasks.base import Task

def score(completions, **columns):
    return [1.0] * len(completions)

def quits(*given, **named):
    sys.exit({code})

def credits():
    return replace(grpo(), credit=quits)

class Quits(Task):
    name, __init__ = "quits", quits

class Stops(Task):
    name, prompts, held_out = "stops", quits, quits

    def __init__(self, renderer, *, seed):
        self.reward_functions = (score,)
"""
PLACES = {
    "a reward when it is imported": {"rewards": [{"path": "quits.py:score"}]},
    "a module when it is imported": {"rewards": [{"path": "quits:score"}]},
    "an algorithm when it is imported": {"algorithm": {"path": "quits.py:credits"}},
    "an algorithm when it is called": {"algorithm": {"path": "quits.py:quits"}},
    "a rule of credit": {"algorithm": {"path": "quits.py:credits"}},
    "a task when it is made": {"task": {"path": "quits.py:Quits"}},
    "a task when it is asked": {"task": {"path": "quits.py:Stops"}},
}


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("place", "code"),
    [
        *((place, "'needs another machine'") for place in PLACES),
        *((place, code) for place in ("a reward when it is imported", "a task when it is asked") for code in ("", "0")),
    ],
)
def test_a_file_that_leaves_ends_no_command_in_silence_and_none_well(
    place: str, code: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = tiny_recipe(tmp_path, model={"path": str(model)})
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | PLACES[place]))
    at_import = f"sys.exit({code})" if "imported" in place else ""
    (tmp_path / "quits.py").write_text(CODE.format(at_import=at_import, code=code))
    ended = called("rl", "recipe.yaml")
    assert ended.code != 0
    mentions(ended.err, f"calls sys.exit({code})", "quits")
