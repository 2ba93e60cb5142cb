"""The whole loop learns an easy reward and nothing from noise; where that reward is not the task, an alarm says so."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import posttrain
from tests.support.runs import metrics_of, save_tiny_model

ROWS = [{"prompt": f"{word} ", "number": number} for number, word in enumerate(["Use", "Make", "Add", "Stop"])]


def letters(completions: list[str]) -> list[float]:
    """Share of characters that are ASCII letters: to be had without any arithmetic."""
    return [fmean(c.isascii() and c.isalpha() for c in text) if text else 0.0 for text in completions]


def dealt_out(completions: list[str]) -> list[float]:
    """The same rewards, dealt out over the whole step at random: a function of what was sampled."""
    rewards = letters(completions)
    Random("".join(completions)).shuffle(rewards)
    return rewards


def trained(
    folder: Path, reward: Callable[..., list[float]], task: Mapping[str, Any], every_steps: int = 0, **own: Any
) -> Path:
    """The folder of a run of 20 steps."""
    config = posttrain.load_recipe(
        model={"path": str(save_tiny_model(folder / "model"))},
        task=task,
        rollout={"prompts_per_step": 4, "group_size": 16, "max_completion_tokens": 8},
        update={"learning_rate": 2e-2},
        evaluation={"every_steps": every_steps, "samples": 1},
        checkpoint={"every_steps": 0},
        run={"folder": str(folder / "run"), "num_steps": 20, "threads": 1},
    )
    return posttrain.train(config, rewards=[reward], **own).folder


def shares_of_letters(folder: Path, reward: Callable[..., list[float]]) -> list[float]:
    """Mean reward at each step of a run on rows."""
    run = trained(folder, reward, {"name": "dataset", "held_out_share": 0.0}, rows=ROWS)
    return [step["reward"] for step in metrics_of(run)[1:]]


def test_the_loop_learns_what_earns_reward(tmp_path: Path) -> None:
    shares = shares_of_letters(tmp_path, letters)
    assert fmean(shares[:2]) < 0.6
    assert fmean(shares[-4:]) > 0.85


def test_rewards_permuted_over_the_step_teach_nothing(tmp_path: Path) -> None:
    shares = shares_of_letters(tmp_path, dealt_out)
    assert abs(fmean(shares[-4:]) - fmean(shares[:2])) < 0.08


def alarms_of(folder: Path, reward: Callable[..., list[float]]) -> list[dict[str, object]]:
    """The alarms of a run on Countdown, whose held-out problems are judged by its own grader."""
    file = trained(folder, reward, {"name": "countdown", "held_out_size": 16}, every_steps=5) / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_reward_that_is_learned_in_place_of_the_task_raises_its_alarm_with_a_transcript(tmp_path: Path) -> None:
    told = {alarm["alarm"]: alarm for alarm in alarms_of(tmp_path, letters)}
    assert "reward alone" in told
    shown = str(told["reward alone"]["transcript"]).splitlines()
    assert shown[0].startswith("Use all of")
    assert letters(["".join(shown[1:])])[0] > 0.8


def test_rewards_permuted_over_the_step_raise_no_alarm(tmp_path: Path) -> None:
    assert alarms_of(tmp_path, dealt_out) == []
