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
    if not rewards:
        after = run.summary["after"]
        assert after["accuracy_sampled"] is after["accuracy_greedy"] is None
        assert after["reward"] > 1
        assert not [line for line in metrics_of(run.folder) if "eval/accuracy_sampled" in line]
    return [step["reward"] for step in metrics_of(run.folder) if "reward" in step]


def test_full_stops_become_three_times_as_many(base: Path, tmp_path: Path) -> None:
    counts = rewards_of_steps(base, tmp_path / "run")
    assert counts[0] < TOKENS / 6
    assert fmean(counts[-3:]) > 3 * counts[0]


def test_full_stops_that_are_paid_to_whoever_does_not_become_more(base: Path, tmp_path: Path) -> None:
    counts = rewards_of_steps(base, tmp_path / "run", [permuted])
    assert fmean(counts[-3:]) < 1.7 * fmean(counts[:3])


def test_the_bundled_prose_model_is_that_of_its_recipe_and_the_toy_starts_from_it(tmp_path: Path) -> None:
    """Its held-out loss is the one in the recipe's header; another processor's rounding moves the fourth digit."""
    assert posttrain.load_recipe("period-count-ppo").model.path == "bundled-prose"
    config = posttrain.load_recipe(
        kind=SftConfig,
        model={"path": "bundled-prose"},
        task={"name": "sentences"},
        sft={"tokens_per_batch": 300, "tokens_per_microbatch": 4096, "eval_size": 128},
        checkpoint={"every_steps": 0},
        run={"folder": str(tmp_path / "more"), "num_steps": 1, "threads": 1},
    )
    before = posttrain.train_sft(config).summary["before"]
    assert before["loss"] == pytest.approx(0.388, abs=0.001)
    groups = posttrain.generate("bundled-prose", "Once upon a time", group_size=64, max_completion_tokens=20)
    counts = [rollout.text.count(".") for group in groups for rollout in group.rollouts]
    assert 1 < fmean(counts) < 2.5  # 1.56 behind all four beginnings, with a deviation of .7 for one completion
