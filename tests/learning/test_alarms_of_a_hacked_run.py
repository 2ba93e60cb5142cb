"""A run whose reward is not its task raises the alarm for it, and one that learns nothing raises none."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean

import posttrain
from tests.support.runs import save_tiny_model


def letters(completions: list[str]) -> list[float]:
    """Share of characters that are ASCII letters: to be had without any arithmetic."""
    return [fmean(c.isascii() and c.isalpha() for c in text) if text else 0.0 for text in completions]


def dealt_out(completions: list[str]) -> list[float]:
    """The same rewards, dealt out over the whole step at random."""
    rewards = letters(completions)
    Random("".join(completions)).shuffle(rewards)
    return rewards


def alarms_of(tmp_path: Path, reward: Callable[..., list[float]]) -> list[dict[str, object]]:
    """The alarms of 20 steps on Countdown, whose held-out problems are judged by its own grader."""
    config = posttrain.load_recipe(
        model={"path": str(save_tiny_model(tmp_path / "model"))},
        task={"name": "countdown", "held_out_size": 16},
        rollout={"prompts_per_step": 4, "group_size": 16, "max_completion_tokens": 8},
        update={"learning_rate": 2e-2},
        evaluation={"every_steps": 5, "samples": 1},
        checkpoint={"every_steps": 0},
        run={"folder": str(tmp_path / "run"), "num_steps": 20, "threads": 1},
    )
    run = posttrain.train(config, rewards=[reward])
    file = run.folder / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_reward_that_is_learned_in_place_of_the_task_raises_its_alarm_with_a_transcript(tmp_path: Path) -> None:
    told = {alarm["alarm"]: alarm for alarm in alarms_of(tmp_path, letters)}
    assert "reward alone" in told
    shown = str(told["reward alone"]["transcript"]).splitlines()
    assert shown[0].startswith("Use all of")
    assert letters(["".join(shown[1:])])[0] > 0.8


def test_rewards_permuted_over_the_step_raise_no_alarm(tmp_path: Path) -> None:
    assert alarms_of(tmp_path, dealt_out) == []
