"""A real transformer, whole or under an adapter, learns a preference for even tokens, and nothing from noise."""

from statistics import fmean

import pytest
import torch

from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import UpdateOptions
from tests.support.adapted import adapted_policy
from tests.support.tiny import tiny_policy
from tests.support.toy import Toy, train_on


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
