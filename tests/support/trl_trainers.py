"""Each of TRL's trainers over a tiny model, with rows that suit it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

PROMPTS = [{"prompt": f"{number} + 1 ="} for number in range(1, 9)]
ANSWERS = [row | {"completion": f" {number + 1}"} for number, row in enumerate(PROMPTS)]
PAIRS = [row | {"chosen": f" {number + 1}", "rejected": f" {number + 2}!"} for number, row in enumerate(PROMPTS)]
SAMPLED = {"max_completion_length": 4, "num_generations": 2}
KINDS: dict[str, tuple[Any, Any, list[dict[str, str]], dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, PROMPTS, SAMPLED),
    "rloo": (RLOOTrainer, RLOOConfig, PROMPTS, SAMPLED),
    "sft": (SFTTrainer, SFTConfig, ANSWERS, {}),
    "dpo": (DPOTrainer, DPOConfig, PAIRS, {}),
    "reward": (RewardTrainer, RewardConfig, PAIRS, {}),
}
"""Trainer, arguments, rows and what its arguments have beside those that all have."""
Kind = pytest.mark.parametrize("kind", KINDS)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def trainer(kind: str, model: Any, folder: Path, *, bases: Callable[[Any], Any] = lambda own: own, **given: Any) -> Any:
    """A trainer; a field of its config goes there, and the rest to its constructor."""
    own, config, rows, sampled = KINDS[kind]
    named = {name: given.pop(name) for name in [*given] if name not in config.field_rules}
    args = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3}
    rewards = {"reward_funcs": length} if sampled else {}
    config = config(str(folder), **{**args, **sampled, **given})
    return bases(own)(**{"model": model, "args": config, "train_dataset": rows, **rewards, **named})


def weights(made: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in made.model.parameters()]
