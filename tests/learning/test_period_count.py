"""The course's toy, small: PPO with a value head pays a GPT-2 for full stops, and they become many; noise adds none."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

import posttrain
from posttrain.config import SftConfig
from tests.support.runs import metrics_of

TOKENS = 20


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer that has read 30,000 tokens of the grammar: it ends a sentence now and then."""
    folder = tmp_path_factory.mktemp("sentences") / "base"
    shape = {"hidden_size": 32, "mlp_size": 64, "num_layers": 1, "num_heads": 2, "max_positions": 256}
    config = posttrain.load_recipe(
        "period-count-base",
        kind=SftConfig,
        model=shape,
        sft={"learning_rate": 1e-2, "warmup_steps": 5, "tokens_per_batch": 1000, "eval_size": 1, "eval_every": 30},
        checkpoint={"every_steps": 0},
        run={"folder": str(folder), "num_steps": 30, "threads": 1},
    )
    posttrain.train_sft(config)
    return folder / "model"


def permuted(completions: list[str]) -> list[float]:
    """The step's numbers of full stops, dealt out over its completions at random: a function of what was sampled."""
    counts = [float(text.count(".")) for text in completions]
    Random("".join(completions)).shuffle(counts)
    return counts


def rewards_of_steps(base: Path, folder: Path, rewards: Sequence[Any] = ()) -> list[float]:
    """Full stops per completion at each step."""
    config = posttrain.load_recipe(
        "period-count-ppo",
        model={"path": str(base)},
        task={"name": "sentences", "held_out_size": 1},
        algorithm={"critic": {"fit_steps": 0}},
        rollout={"prompts_per_step": 32, "max_completion_tokens": TOKENS},
        update={"learning_rate": 1e-3},
        evaluation={"samples": 1},
        run={"folder": str(folder), "num_steps": 20, "threads": 1},
    )
    run = posttrain.train(config, rewards=rewards)
    return [step["reward"] for step in metrics_of(run.folder) if "reward" in step]


def test_full_stops_become_three_times_as_many(base: Path, tmp_path: Path) -> None:
    counts = rewards_of_steps(base, tmp_path / "run")
    assert counts[0] < TOKENS / 6
    assert fmean(counts[-3:]) > 3 * counts[0]


def test_full_stops_that_are_paid_to_whoever_does_not_become_more(base: Path, tmp_path: Path) -> None:
    counts = rewards_of_steps(base, tmp_path / "run", [permuted])
    assert fmean(counts[-3:]) < 1.7 * fmean(counts[:3])
