"""A real transformer learns a preference for even tokens through sampler, batch and update, and nothing from noise."""

from statistics import fmean

import pytest
import torch

from posttrain.options.training import UpdateOptions
from tests.support.tiny import tiny_policy
from tests.support.toy import Toy, train_on


def rewards(family: str, *, shuffled: bool, algorithm: str = "grpo", **update: int) -> list[float]:
    """Share of even tokens at each of 32 steps."""
    toy = Toy(
        algorithm={"name": algorithm},
        update=UpdateOptions(learning_rate=3e-3, **update),
        group_size=8,
        num_steps=32,
        shuffled=shuffled,
    )
    return [step["reward"] for step in train_on(toy, tiny_policy(family, torch.float32))]


@pytest.mark.parametrize(("family", "algorithm"), [("qwen3", "grpo"), ("gpt2_plain", "dapo")])
def test_rewards_are_learned(family: str, algorithm: str) -> None:
    # 12 of the 24 tokens are even, so the share begins near a half.
    shares = rewards(family, shuffled=False, algorithm=algorithm)
    assert fmean(shares[:3]) < 0.6
    assert fmean(shares[-5:]) > 0.85


def test_rewards_that_are_dealt_out_at_random_teach_nothing() -> None:
    shares = rewards("qwen3", shuffled=True)
    assert abs(fmean(shares[-5:]) - fmean(shares[:5])) < 0.12
