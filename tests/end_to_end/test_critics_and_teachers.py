"""Runs with a critic or a teacher: what they report, that they resume to the bit, and what they refuse."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import posttrain
from posttrain.training.rl import show_rl_plan
from posttrain.training.session import CallerObjects
from tests.support.dice import dice
from tests.support.refusals import refused
from tests.support.runs import metrics_of, require_same, save_tiny_model

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


def test_a_critic_starts_from_earlier_rollouts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


SUMS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a student and a teacher."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "student")
    save_tiny_model(folder / "teacher", seed=1)
    return folder


def even(completions: list[str]) -> list[float]:
    return [float(len(text) % 2 == 0) for text in completions]


def config_of(models: Path, folder: Path, teacher: dict[str, object], **algorithm: object) -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(models / "student")},
        task={"name": "dataset", "held_out_share": 0.0},
        algorithm={"name": "distill", "teacher": teacher, **algorithm},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 8},
        update={"learning_rate": 1e-2, "epochs_per_step": 2},
        evaluation={"every_steps": 0},
        checkpoint={"every_steps": 1, "keep_last": 3},
        run={"folder": str(folder), "num_steps": 3, "threads": 1},
    )


def trained(config: posttrain.Config, **options: Any) -> list[dict[str, Any]]:
    run = posttrain.train(config, rows=SUMS, rewards=[even], **options)
    return metrics_of(run.folder)[1:]


def test_a_run_taught_by_itself_beside_rewards_resumes_to_the_bit(models: Path, tmp_path: Path) -> None:
    config = config_of(models, tmp_path / "run", {"sees": "sibling"}, reward_weight=1.0)
    whole = trained(config)
    assert all(0 < step["teacher/shown"] < 1 for step in whole)
    assert any(step["kl_teacher"] != 0 for step in whole)
    assert trained(config, resume=True, from_step=1) == whole


def test_an_answer_is_shown_to_every_completion_and_the_sampled_signal_is_told(models: Path, tmp_path: Path) -> None:
    teacher = {"sees": "answer", "weights": "start"}
    steps = trained(config_of(models, tmp_path / "run", teacher, signal="sampled", horizon="completion"))
    assert all(step["teacher/shown"] == 1 and step["kl_teacher"] != 0 for step in steps)


def test_another_model_teaches_and_the_run_knows_it_by_its_content(models: Path, tmp_path: Path) -> None:
    config = config_of(models, tmp_path / "run", {"model": str(models / "teacher")})
    steps = trained(config)
    assert all(step["kl_teacher"] > 0 for step in steps)
    assert all("teacher/shown" not in step for step in steps)
    save_tiny_model(models / "teacher", seed=2)
    with refused("algorithm.teacher.model"):
        trained(config, resume=True, from_step=1)


def test_a_model_beside_the_policy_reads_as_far_as_completions_go(models: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(models / "teacher", short)
    content = json.loads((short / "config.json").read_text())
    config = config_of(models, tmp_path / "run", {"model": str(short)})
    # A prompt of 4 tokens, and 8 of the completion.
    for positions in (12, 11):
        (short / "config.json").write_text(json.dumps(content | {"max_position_embeddings": positions}))
        if positions == 12:
            assert len(trained(config)) == 3
            continue
        says = r": the model reads 11 tokens, and the longest prompt with its completion has up to 12"
        overwrite = replace(config, run=replace(config.run, overwrite=True))
        with refused(f"algorithm.teacher.model{says}"):
            trained(overwrite)
        critic = {"name": "ppo", "critic": {"trunk": "own", "path": str(short)}}
        with refused(f"algorithm.critic.path{says}"):
            trained(replace(overwrite, algorithm=critic))
        with_kl = replace(overwrite, algorithm={"name": "grpo", "kl": {"coefficient": 0.1}})
        with refused(f"reference.path{says}"):
            trained(replace(with_kl, reference=replace(with_kl.reference, path=str(short))))


def test_what_a_teacher_shows_is_learned_where_no_reward_tells_anything(models: Path, tmp_path: Path) -> None:
    config = config_of(models, tmp_path / "run", {"model": str(models / "teacher")})
    config = replace(config, grading=replace(config.grading, max_same_reward_steps=2))
    run = posttrain.train(config, rows=SUMS, rewards=[never])
    assert [line["reward"] for line in metrics_of(run.folder)[1:]] == [0.0] * 3
    assert not (run.folder / "alarms.jsonl").read_text()


def never(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)
