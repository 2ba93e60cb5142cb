"""Behaviours over a run: in its metrics and evaluations, and read afterwards from its completions by the command."""

import json
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.behaviours.behaviour_reader import BehaviourReader, read_history
from posttrain.behaviours.behaviour_table import chosen_rows
from tests.support.commands import printed, refusal
from tests.support.pages import documented
from tests.support.pictures import width_and_height
from tests.support.runs import save_tiny_model

DRAWS = True
OWN = {"has_digit": {"any": ["[0-9]"]}}


def config(folder: Path, **behaviours: Any) -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(folder / "model")},
        task={"name": "countdown", "held_out_size": 4},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8},
        evaluation={"every_steps": 0, "samples": 2},
        checkpoint={"every_steps": 0},
        behaviours=behaviours,
        run={"folder": str(folder / "run"), "num_steps": 3, "threads": 1, "overwrite": True},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("behaviours")
    save_tiny_model(folder / "model")
    return posttrain.train(config(folder, measure=["several_tries"], patterns=OWN)).folder


def test_rates_are_metrics_of_every_step_and_of_both_evaluations(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {f"behaviour{kind}/{row}" for kind in ("", "_signs") for row in ("several_tries", "has_digit")}
    for step in lines[1:4]:
        assert {name for name in step if name.startswith("behaviour")} == names
    for evaluation in (lines[0], lines[4]):
        assert {name for name in evaluation if "behaviour" in name} == {f"eval/{name}" for name in names}
    summary = json.loads((run / "summary.json").read_text())
    assert names <= summary["before"].keys() & summary["after"].keys()
    assert all(documented(name) and documented(f"eval/{name}") for name in names)
    # A random model of 380 tokens, ten of which are digits and more of which hold one, writes some.
    assert 0 < max(step["behaviour/has_digit"] for step in lines[1:4]) <= 1


def test_what_is_read_afterwards_is_what_the_run_measured(run: Path) -> None:
    reader = BehaviourReader(chosen_rows(posttrain.load_recipe(run / "config.yaml").behaviours))
    history = read_history(run, reader)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:4]
    for name in ("several_tries", "has_digit"):
        steps, shares = history.shares(name)
        assert steps == [1, 2, 3]
        assert shares == pytest.approx([line[f"behaviour/{name}"] for line in lines])
        assert history.signs(name)[1] == pytest.approx([line[f"behaviour_signs/{name}"] for line in lines])


def test_the_command_shows_a_table_and_draws_a_picture(run: Path) -> None:
    said = printed("behaviours", run)
    assert f"{run}: 24 completions of 3 steps" in said
    assert [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| `")] == ["`has_digit`"]
    assert "\nNot seen in any completion: `several_tries`.\n" in said  # of a random model
    assert width_and_height(run / "behaviours.png")[0] == 1540  # 14 inches of 110 dots

    picture = run / "others.png"
    assert "`verification`" in printed("behaviours", run, "--behaviours.measure", "prose", "--picture", picture)
    assert picture.is_file()


def test_a_folder_without_rollouts_is_told_and_a_run_that_measures_nothing_has_no_such_metrics(tmp_path: Path) -> None:
    assert "has no rollouts/step-N.parquet" in refusal("behaviours", tmp_path)
    (tmp_path / "config.yaml").write_text("demonstrator: {num_examples: 3}\n")  # of another kind
    assert "has no rollouts/step-N.parquet" in refusal("behaviours", tmp_path)
    save_tiny_model(tmp_path / "model")
    with posttrain.steps(config(tmp_path)) as steps:
        assert not [name for name in next(steps).metrics if name.startswith("behaviour")]
    said = refusal("behaviours", tmp_path / "run", "--picture", tmp_path / "no" / "where.png")
    assert "name a file in a folder that exists" in said
