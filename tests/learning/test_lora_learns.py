"""An adapter of rank 4 over a frozen random model learns a preference for even tokens, and nothing from noise."""

from statistics import fmean

import torch

from posttrain.options.adapter import AdapterOptions
from posttrain.options.training import UpdateOptions
from tests.support.adapted import adapted_policy
from tests.support.toy import Toy, train_on


def rewards(*, shuffled: bool = False, kl: float = 0.0) -> list[float]:
    """Share of even tokens at each of 24 steps."""
    toy = Toy(
        algorithm={"name": "grpo", "kl": {"coefficient": kl}} if kl else {"name": "grpo"},
        update=UpdateOptions(learning_rate=5e-2),
        group_size=8,
        num_steps=24,
        shuffled=shuffled,
    )
    policy = adapted_policy(options=AdapterOptions(rank=4, alpha=8), dtype=torch.float32, filled=False)
    return [step["reward"] for step in train_on(toy, policy)]


def test_rewards_are_learned() -> None:
    shares = rewards()
    assert fmean(shares[:3]) < 0.6
    assert fmean(shares[-5:]) > 0.75


def test_rewards_that_are_dealt_out_at_random_teach_nothing() -> None:
    shares = rewards(shuffled=True)
    assert abs(fmean(shares[-5:]) - fmean(shares[:5])) < 0.12


def test_a_strong_kl_to_the_base_keeps_it_there() -> None:
    """Which it could not if the reference moved with the adapter."""
    assert fmean(rewards(kl=10.0)[-5:]) < 0.65
