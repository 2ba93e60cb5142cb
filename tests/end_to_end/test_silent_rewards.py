"""Rewards that score nothing, or always the same; rewards that change the process they run in; runs of a tiny model."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.cli import main
from posttrain.errors import RunError
from tests.end_to_end.test_own_objects import Sums, config, policy_of
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("silent") / "model")


def nothing(completions: Sequence[str]) -> list[None]:
    return [None for _ in completions]


def broken(completions: Sequence[str]) -> list[float]:
    raise ZeroDivisionError


def always(completions: Sequence[str]) -> list[float]:
    return [1.0 for _ in completions]


def trained(model: Path, folder: Path, reward: Any, num_steps: int, **sections: Any) -> posttrain.Run:
    policy = policy_of(model)
    told = config(folder, num_steps, checkpoint={"every_steps": 1}, **sections)
    return posttrain.train(told, policy=policy, task=Sums(policy), rewards=[reward])


def alarms_of(folder: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]
    return [(line["step"], line["alarm"]) for line in lines]


@pytest.mark.parametrize("reward", [nothing, broken])
def test_a_reward_that_never_scores_is_told_at_once_and_ends_the_run(reward: Any, model: Path, tmp_path: Path) -> None:
    sections = {"grading": {"max_unscored_steps": 3}, "rollout": {"on_reward_error": "none"}}
    with refused("step 3: ", "--accept-changes", "accept_changes=True", "max_unscored_steps = 3", error=RunError):
        trained(model, tmp_path, reward, 5, **sections)
    assert (1, "unscored") in alarms_of(tmp_path)
    assert [line["frac_unscored"] for line in metrics_of(tmp_path)[1:]] == [1.0] * 3
    # The step is taken again by a run that is resumed, whose reward is mended.
    policy = policy_of(model)
    again = config(tmp_path, 4, checkpoint={"every_steps": 1}, **sections)
    posttrain.train(again, policy=policy, task=Sums(policy), rewards=[always], resume=True, accept_changes=True)
    assert [line["frac_unscored"] for line in metrics_of(tmp_path)[1:]] == [1.0, 1.0, 0.0, 0.0]


def test_with_the_limit_off_a_run_goes_on_and_a_step_that_scores_begins_the_count_anew(
    model: Path, tmp_path: Path
) -> None:
    sections = {"grading": {"max_unscored_steps": 0}}
    assert trained(model, tmp_path / "off", nothing, 3, **sections).summary
    steps: list[int] = []

    def every_third(completions: Sequence[str]) -> list[float | None]:
        steps.extend([1] * (len(completions) == 12))  # not an evaluation
        return [0.5 if len(steps) % 3 == 0 else None for _ in completions]

    assert trained(model, tmp_path / "on", every_third, 6, grading={"max_unscored_steps": 3}).summary
    with refused("max_unscored_steps = -1"):
        config(tmp_path, 1, grading={"max_unscored_steps": -1})


def test_a_reward_that_is_always_the_same_is_an_alarm_and_no_more(model: Path, tmp_path: Path) -> None:
    assert trained(model, tmp_path, always, 2).summary
    assert alarms_of(tmp_path) == [(1, "same reward")]


def test_a_reward_that_stays_the_same_ends_the_run_after_the_steps_that_are_allowed(
    model: Path, tmp_path: Path
) -> None:
    sections = {"grading": {"max_same_reward_steps": 3}}
    with refused("step 3: ", "grading.max_same_reward_steps = 3", error=RunError):
        trained(model, tmp_path / "constant", always, 5, **sections)
    assert trained(model, tmp_path / "off", always, 4, grading={"max_same_reward_steps": 0}).summary
    batches: list[int] = []

    def once(completions: Sequence[str]) -> list[float]:
        batches.append(len(completions))
        return [float(batches.count(12) == 1 and number == 0) for number in range(len(completions))]

    assert trained(model, tmp_path / "once", once, 4, **sections).summary  # a difference, once, is something learned


def test_a_reward_that_changes_the_working_folder_changes_no_file_of_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def wanders(completions: Sequence[str]) -> list[float]:
        os.chdir(tmp_path / "there")
        return [float(len(text)) for text in completions]

    run = trained(model, Path("runs/one"), wanders, 2)
    assert run.folder == tmp_path / "here" / "runs" / "one"
    assert {"summary.json", "model", "rollouts", "checkpoints"} <= {each.name for each in run.folder.iterdir()}
    assert list((tmp_path / "there").iterdir()) == []
    assert f"run folder   {run.folder}" in capsys.readouterr().out.replace("\n", "")
    monkeypatch.chdir(tmp_path / "here")
    trained(model, Path("runs/two"), always, 1)
    assert "run folder   runs/two" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit(0)", "raised SystemExit: 0"),
        ("sys.stdout.close()", "'mine': closed the standard output"),
    ],
)
def test_by_the_command_a_reward_that_ends_the_program_is_an_error(
    body: str, says: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    import io
    import sys

    place = tmp_path / "place"
    recipe = tiny_recipe(place, model={"path": str(model)}, run={"num_steps": 1})
    (place / "mine.py").write_text(f"import sys\n\ndef mine(completions, **columns):\n    {body}\n    return []\n")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["rl", str(recipe), "--rewards", f"{place}/mine.py:mine"]) == 1
    assert says in capsys.readouterr().err
