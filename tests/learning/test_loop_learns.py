"""The whole loop, from rows and a function to a saved model, learns an easy reward and learns nothing from noise."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean

import posttrain
from tests.support.runs import metrics_of, save_tiny_model

ROWS = [{"prompt": f"{word} ", "number": number} for number, word in enumerate(["Use", "Make", "Add", "Stop"])]


def letters(completions: list[str]) -> list[float]:
    """Share of characters that are ASCII letters."""
    return [fmean(c.isascii() and c.isalpha() for c in text) if text else 0.0 for text in completions]


def dealt_out(completions: list[str], number: list[int]) -> list[float]:
    """The same rewards, dealt out over the whole step at random: a function of what was sampled."""
    rewards = letters(completions)
    Random("".join(completions)).shuffle(rewards)
    return rewards


def shares_of_letters(tmp_path: Path, reward: Callable[..., list[float]]) -> list[float]:
    """Mean reward at each of 20 steps."""
    config = posttrain.load_recipe(
        model={"path": str(save_tiny_model(tmp_path / "model"))},
        task={"name": "dataset", "held_out_share": 0.0},
        rollout={"prompts_per_step": 4, "group_size": 16, "max_completion_tokens": 8},
        update={"learning_rate": 2e-2},
        evaluation={"every_steps": 0},
        checkpoint={"every_steps": 0},
        run={"folder": str(tmp_path / "run"), "num_steps": 20, "threads": 1},
    )
    run = posttrain.train(config, rows=ROWS, rewards=[reward])
    return [step["reward"] for step in metrics_of(run.folder)[1:]]


def test_the_loop_learns_what_earns_reward(tmp_path: Path) -> None:
    shares = shares_of_letters(tmp_path, letters)
    assert fmean(shares[:2]) < 0.6
    assert fmean(shares[-4:]) > 0.85


def test_rewards_permuted_over_the_step_teach_nothing(tmp_path: Path) -> None:
    shares = shares_of_letters(tmp_path, dealt_out)
    assert abs(fmean(shares[-4:]) - fmean(shares[:2])) < 0.08
