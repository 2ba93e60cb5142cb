"""Groups of several sizes: closed forms against all that can be drawn, and measures against them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms.advantages import leave_one_out
from posttrain.variance import (
    baseline_deviation,
    measured_baseline_deviation,
    measured_uninformative_share,
    squared_advantage,
    success_rates,
    unbiased_uninformative_share,
    uninformative_share,
)
from tests.support.refusals import refused


def every_draw(p: float, size: int) -> list[tuple[float, torch.Tensor]]:
    """All rewards that so many completions may earn, with how likely they are."""
    draws = itertools.product((0.0, 1.0), repeat=size)
    return [
        (math.prod(p if each else 1 - p for each in draw), torch.tensor([draw], dtype=torch.float64)) for draw in draws
    ]


@settings(max_examples=15)
@given(p=st.floats(0.05, 0.95), size=st.integers(2, 6))
def test_the_share_of_groups_without_information_and_the_noise_of_their_mean_are_those_of_all_draws(
    p: float, size: int
) -> None:
    draws, rate = every_draw(p, size), torch.tensor([p], dtype=torch.float64)
    share = sum(chance * measured_uninformative_share(rewards, size) for chance, rewards in draws)
    assert uninformative_share(rate, size) == pytest.approx(share, rel=1e-9)
    squares = sum(chance * (rewards.mean().item() - p) ** 2 for chance, rewards in draws)
    assert baseline_deviation(rate, size) == pytest.approx(math.sqrt(squares), rel=1e-9)


@settings(max_examples=15)
@given(chances=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3), size=st.integers(2, 5))
def test_the_squared_advantage_is_that_of_all_draws_of_prompts_that_differ(chances: list[float], size: int) -> None:
    square = reward = 0.0
    for p in chances:
        for chance, rewards in every_draw(p, size):
            square += chance * leave_one_out(rewards).square().mean().item()
            reward += chance * rewards.square().mean().item()
    rates = torch.tensor(chances, dtype=torch.float64)
    assert squared_advantage(rates, size) == pytest.approx(square / reward, rel=1e-9)
    with refused("nothing to compare"):
        squared_advantage(rates, 1)


@settings(max_examples=15)
@given(p=st.floats(0.05, 0.95), size=st.integers(2, 4))
def test_the_share_from_counted_successes_is_without_bias_where_that_at_their_rate_is_not(p: float, size: int) -> None:
    draws, rate = every_draw(p, 6), torch.tensor([p], dtype=torch.float64)
    expected = sum(chance * unbiased_uninformative_share(rewards, size) for chance, rewards in draws)
    assert expected == pytest.approx(uninformative_share(rate, size), rel=1e-9)
    at_rate = sum(chance * uninformative_share(success_rates(rewards), size) for chance, rewards in draws)
    assert at_rate > expected + 1e-6


def test_shares_are_means_over_prompts_and_all_samples_may_be_one_group() -> None:
    # .5² + .5² = 1/2 and 1
    assert uninformative_share(torch.tensor([0.5, 1.0]).double(), 2) == 0.75
    assert unbiased_uninformative_share(torch.tensor([[1.0, 1.0], [1.0, 0.0]]).double(), 2) == pytest.approx(0.5)
    # p (1 - p) = 0 and 1/4, times 2, over a mean p of 1/4
    assert squared_advantage(torch.tensor([0.0, 0.5]).double(), 2) == pytest.approx(1.0)
    with refused("groups of 2, at most 0 of which earn 1"):
        squared_advantage(torch.zeros(2).double(), 2)


def test_the_unbiased_share_is_that_among_all_groups_of_the_samples() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.float64)
    rows = [[row[list(pick)] for pick in itertools.combinations(range(5), 3)] for row in rewards]
    shares = [sum(len(set(group.tolist())) == 1 for group in groups) / len(groups) for groups in rows]
    assert unbiased_uninformative_share(rewards, 3) == pytest.approx(sum(shares) / 2, rel=1e-12)


def test_the_noise_of_a_sampled_mean_is_the_spread_of_a_prompts_groups() -> None:
    # Groups of 2: means 1, 0 and 1/2, 1/2; variances 1/2 and 0; those left over are left out.
    rewards = torch.tensor([[1.0, 1, 0, 0, 1], [1, 0, 0, 1, 1]], dtype=torch.float64)
    assert measured_baseline_deviation(rewards, 2) == pytest.approx(math.sqrt(1 / 4), rel=1e-12)
    assert measured_uninformative_share(rewards, 2) == 0.5


def test_too_few_samples_and_other_rewards_are_told() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64)
    with refused("3 samples of a prompt make no group of 4"):
        measured_uninformative_share(rewards, 4)
    with refused("3 samples of a prompt make no group of 4"):
        unbiased_uninformative_share(rewards, 4)
    with refused("3 samples of a prompt are 1 group of 2: give 2"):
        measured_baseline_deviation(rewards, 2)
    with refused("rewards must be 0 or 1"):
        success_rates(rewards)
