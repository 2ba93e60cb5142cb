"""Runs whose algorithm has a teacher: what they report, that they resume to the bit, and whom they refuse."""

from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.errors import UserError
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
    with pytest.raises(UserError, match=r"algorithm\.teacher\.model"):
        trained(config, resume=True, from_step=1)
