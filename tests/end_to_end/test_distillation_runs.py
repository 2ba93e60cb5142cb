"""Runs whose algorithm has a teacher: what they report, that they resume to the bit, and whom they refuse."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]


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
    run = posttrain.train(config, rows=ROWS, rewards=[even], **options)
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
    run = posttrain.train(config, rows=ROWS, rewards=[never])
    assert [line["reward"] for line in metrics_of(run.folder)[1:]] == [0.0] * 3
    assert not (run.folder / "alarms.jsonl").read_text()


def never(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)
