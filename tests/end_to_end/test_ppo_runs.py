"""A whole run of PPO: groups of one, stopped and resumed to the same bits, what it leaves, and begun from that."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import posttrain
from posttrain.training.caller_objects import CallerObjects
from posttrain.training.rl import show_rl_plan
from tests.support.dice import dice
from tests.support.refusals import refused
from tests.support.runs import metrics_of, require_same

ROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]
ALGORITHM = {
    "name": "ppo",
    "critic": {"fit_steps": 1},
    "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"},
    "adaptive_kl": {"target": 0.01, "horizon": 50.0},
    "reward_scaling": {},
    "missing_stop_penalty": 0.5,
}


def config(model: Path, folder: Path, **critic: object) -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(model)},
        task={"name": "dataset", "held_out_share": 0.2},
        algorithm={**ALGORITHM, "critic": {**ALGORITHM["critic"], **critic}},
        rollout={"prompts_per_step": 8, "group_size": 1, "max_completion_tokens": 4},
        update={"learning_rate": 1e-2},
        evaluation={"every_steps": 0, "samples": 1},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"folder": str(folder), "num_steps": 4, "threads": 1},
    )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:-1]


def test_a_run_that_is_stopped_and_resumed_is_the_one_that_never_stopped(model: Path, tmp_path: Path) -> None:
    """With a trunk of its own the critic is restored in tests/engine/test_critic.py."""
    whole = posttrain.train(config(model, tmp_path / "whole"), rows=ROWS, rewards=[dice]).folder
    parted = config(model, tmp_path / "parted")
    with posttrain.steps(parted, rows=ROWS, rewards=[dice]) as steps:
        assert [next(steps).step for _ in range(3)] == [1, 2, 3]
    posttrain.train(parted, rows=ROWS, rewards=[dice], resume=True)
    require_same(tmp_path / "parted", whole)
    theirs, ours = (load_file(run / "critic" / "value_head.safetensors") for run in (whole, tmp_path / "parted"))
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())
    assert {file.name for file in (whole / "critic").iterdir()} == {"value_head.safetensors"}
    lines = lines_of(whole)
    assert [line["value/critic_alone"] for line in lines][-1] == 0.0
    assert {line["num_updates"] + line["num_updates_left_out"] for line in lines} == {8.0}
    # The policy moves from step 2 on; step 3 sees how far it went, and step 4 has the coefficient that follows.
    assert [line["kl_coefficient"] == 0.05 for line in lines] == [True, True, True, False]
    assert "value_head.safetensors" not in {file.name for file in (whole / "model").iterdir()}


def test_a_run_may_begin_again_at_its_first_checkpoint(model: Path, tmp_path: Path) -> None:
    """Where the critic does not learn alone and no KL is in the reward nothing has been remembered before step 1."""
    made = config(model, tmp_path / "run")
    made = replace(made, algorithm={"name": "ppo", "critic": {"fit_steps": 0}}, run=replace(made.run, num_steps=2))
    made = replace(made, checkpoint=replace(made.checkpoint, keep_last=2))
    posttrain.train(made, rows=ROWS, rewards=[dice])
    whole = metrics_of(tmp_path / "run")
    posttrain.train(made, rows=ROWS, rewards=[dice], resume=True, from_step=0)
    assert metrics_of(tmp_path / "run") == whole


def test_a_critic_starts_from_earlier_rollouts_and_from_an_earlier_critic(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = posttrain.train(config(model, tmp_path / "first"), rows=ROWS, rewards=[dice]).folder
    capsys.readouterr()
    warm = config(model, tmp_path / "warm", warm_start=str(first / "rollouts"))
    with posttrain.steps(warm, rows=ROWS, rewards=[dice]) as steps:
        told = next(steps)
    assert "The critic learned from 32 earlier rollouts" in capsys.readouterr().out
    assert told.metrics["value/explained_variance"] != 0
    again = config(model, tmp_path / "again", path=str(first / "critic"))
    with posttrain.steps(again, rows=ROWS, rewards=[dice]) as steps:
        assert next(steps).metrics["value/explained_variance"] != 0
    none = config(model, tmp_path / "none", warm_start=str(tmp_path))
    with refused("critic.warm_start", tmp_path, "step-N.parquet"):
        next(posttrain.steps(none, rows=ROWS, rewards=[dice]))
    with refused("critic.warm_start", "step-N.parquet"):
        show_rl_plan(none, CallerObjects(rows=ROWS, rewards=[dice]))
    (tmp_path / "step-1.parquet").write_text("no table")
    with refused("step-1.parquet", "Parquet"):
        next(posttrain.steps(none, rows=ROWS, rewards=[dice]))
