"""Real transformers and the whole loop learn an easy reward and nothing from noise; an alarm tells a reward alone."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from pyarrow import parquet

import posttrain
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import UpdateOptions
from tests.support.adapted import adapted_policy
from tests.support.runs import metrics_of, save_tiny_model
from tests.support.tiny import tiny_policy
from tests.support.toy import Toy, train_on

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


def alarms_of(folder: Path, reward: Callable[..., list[float]]) -> list[dict[str, Any]]:
    """The alarms of a run on Countdown, whose held-out problems are judged by its own grader."""
    file = trained(folder, reward, {"name": "countdown", "held_out_size": 16}, every_steps=5) / "alarms.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_reward_that_is_learned_in_place_of_the_task_raises_its_alarm_with_a_transcript(tmp_path: Path) -> None:
    told = {alarm["alarm"]: alarm for alarm in alarms_of(tmp_path, letters)}
    assert "reward alone" in told
    shown = str(told["reward alone"]["transcript"]).splitlines()
    assert shown[0].startswith("Use all of")
    assert letters(["".join(shown[1:])])[0] > 0.8
    (first, *_), step = told["reward alone"]["rollouts"], told["reward alone"]["step"]
    rows = parquet.read_table(tmp_path / "run" / f"rollouts/step-{step:06d}.parquet").to_pylist()
    named = next(row for row in rows if (row["draw"], row["sample"]) == (first["draw"], first["sample"]))
    assert named["completion"] == "\n".join(shown[1:])


def test_rewards_permuted_over_the_step_raise_no_alarm(tmp_path: Path) -> None:
    assert alarms_of(tmp_path, dealt_out) == []


def shares(policy: Policy, algorithm: dict[str, object], rate: float, num_steps: int, *, shuffled: bool) -> list[float]:
    """Share of even tokens at each step."""
    update = UpdateOptions(learning_rate=rate)
    toy = Toy(algorithm=algorithm, update=update, group_size=8, num_steps=num_steps, shuffled=shuffled)
    return [step["reward"] for step in train_on(toy, policy)]


def of_model(family: str, algorithm: str = "grpo", *, shuffled: bool = False) -> list[float]:
    return shares(tiny_policy(family, torch.float32), {"name": algorithm}, 3e-3, 32, shuffled=shuffled)


def of_adapter(*, shuffled: bool = False, **kl: object) -> list[float]:
    """An adapter of rank 4 over a frozen random model."""
    policy = adapted_policy(options=AdapterOptions(rank=4, alpha=8), dtype=torch.float32, filled=False)
    return shares(policy, {"name": "grpo", **kl}, 5e-2, 24, shuffled=shuffled)


@pytest.mark.parametrize(("family", "algorithm"), [("qwen3", "grpo"), ("gpt2_plain", "dapo")])
def test_rewards_are_learned(family: str, algorithm: str) -> None:
    # 12 of the 24 tokens are even, so the share begins near a half.
    found = of_model(family, algorithm)
    assert fmean(found[:3]) < 0.6
    assert fmean(found[-5:]) > 0.85


def test_an_adapter_learns_rewards() -> None:
    found = of_adapter()
    assert fmean(found[:3]) < 0.6
    assert fmean(found[-5:]) > 0.75


@pytest.mark.parametrize("adapter", [False, True])
def test_rewards_that_are_dealt_out_at_random_teach_nothing(adapter: bool) -> None:
    found = of_adapter(shuffled=True) if adapter else of_model("qwen3", shuffled=True)
    assert abs(fmean(found[-5:]) - fmean(found[:5])) < 0.12


def test_a_strong_kl_to_the_base_keeps_an_adapter_there() -> None:
    """Which it could not if the reference moved with the adapter."""
    assert fmean(of_adapter(kl={"coefficient": 10.0})[-5:]) < 0.65
