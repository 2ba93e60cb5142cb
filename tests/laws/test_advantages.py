"""What holds for advantages whatever the rewards are."""

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.algorithms.advantages import (
    ROUNDING,
    batch_centred,
    group_centred,
    group_zscore,
    informative,
    leave_one_out,
    over_mean,
    raw,
)

SAMPLE = partial(group_zscore, deviation="sample")
ZSCORES = [group_zscore, SAMPLE]
RELATIVE = [batch_centred, group_centred, leave_one_out, *ZSCORES]
EVERY = [raw, *RELATIVE]
NAMES = {raw: "raw", batch_centred: "batch_centred", group_centred: "group_centred", leave_one_out: "leave_one_out"}
NAMES |= {group_zscore: "zscore", SAMPLE: "zscore_sample"}
each_relative = pytest.mark.parametrize("function", RELATIVE, ids=NAMES.get)

EIGHTHS = st.integers(-80, 80).map(lambda eighths: eighths / 8)
"""Rewards whose sums are exact, so that a law about shifts is not a law about rounding."""


@st.composite
def rewards(draw: st.DrawFn, missing: bool = True) -> torch.Tensor:
    num_prompts, group_size = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    values = st.one_of(EIGHTHS, st.sampled_from([0.0, 1.0]), st.just(float("nan"))) if missing else EIGHTHS
    row = st.lists(values, min_size=group_size, max_size=group_size)
    return torch.tensor(draw(st.lists(row, min_size=num_prompts, max_size=num_prompts)), dtype=torch.float64)


def test_rounding_in_one_group_stays_rounding_beside_a_group_that_differs_in_the_same_place() -> None:
    rewards = torch.tensor([[0.3, 0.1 + 0.2], [0.0, 1.0]], dtype=torch.float64)
    assert group_centred(rewards).tolist() == [[0.0, 0.0], [-0.5, 0.5]]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@each_relative
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=40)
@given(reward=st.floats(-1e6, 1e6), num_prompts=st.integers(1, 3), group_size=st.integers(2, 33))
def test_equal_rewards_give_exactly_zero(function, dtype, reward, num_prompts, group_size) -> None:
    assert torch.all(function(torch.full((num_prompts, group_size), reward, dtype=dtype)) == 0)


@each_relative
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_rewards_give_exactly_zero_at_every_usual_value_and_size(function, dtype) -> None:
    # Where the mean of equal floats misses them by an ulp: three times 0.9 is one such.
    values = torch.arange(-100, 101, dtype=torch.float64) / 100
    for group_size in range(2, 65):
        equal = values.to(dtype)[:, None].expand(-1, group_size)
        if function is batch_centred:  # there all rewards of the step have to be equal
            assert all(torch.all(function(row[None]) == 0) for row in equal[::10])
        else:
            assert torch.all(function(equal) == 0)


@each_relative
@given(terms=st.lists(st.floats(0, 1e3), min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_sums_of_the_same_terms_in_any_order_are_equal_rewards(function, terms, seed) -> None:
    dice = random.Random(seed)
    sums = torch.tensor([[sum(dice.sample(terms, len(terms))) for _ in range(8)]], dtype=torch.float64)
    assert torch.all(function(sums) == 0)
    assert not informative(sums).any()


@each_relative
def test_a_third_counted_twice_is_no_information_and_a_little_more_is(function) -> None:
    rounded = torch.tensor([[0.1 + 0.2, 0.3]], dtype=torch.float64)
    assert rounded[0, 0] != rounded[0, 1]
    assert torch.all(function(rounded) == 0)
    apart = torch.tensor([[0.3 + 1e-13, 0.3]], dtype=torch.float64)
    assert torch.all(function(apart) != 0)
    assert informative(apart).tolist() == [True]


@each_relative
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**40, 2.0**-40])
def test_the_bound_is_in_units_of_the_largest_reward(function, dtype, scale) -> None:
    ulp = torch.finfo(dtype).eps
    for steps, equal in ((1, True), (ROUNDING, True), (ROUNDING + 1, False)):
        rewards = torch.tensor([[-1.0, -1.0 + steps * ulp]], dtype=dtype) * scale
        assert bool(torch.all(function(rewards) == 0)) is equal, steps


@pytest.mark.parametrize("function", EVERY, ids=NAMES.get)
@given(rewards=rewards(), seed=st.integers(0, 1000))
def test_the_order_of_rollouts_and_prompts_does_not_matter(function, rewards, seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    columns = torch.randperm(rewards.shape[1], generator=rng)
    rows = torch.randperm(rewards.shape[0], generator=rng)
    assert_same(function(rewards[rows][:, columns]), function(rewards)[rows][:, columns])


@each_relative
@given(rewards=rewards(), shift=EIGHTHS)
def test_a_constant_added_to_all_rewards_changes_nothing(function, rewards, shift) -> None:
    assert_same(function(rewards + shift), function(rewards))


@pytest.mark.parametrize("function", [raw, batch_centred, group_centred, leave_one_out], ids=NAMES.get)
@given(rewards=rewards(), scale=st.floats(0.01, 100))
def test_without_a_deviation_advantages_are_in_units_of_reward(function, rewards, scale) -> None:
    assert_same(function(scale * rewards) / scale, function(rewards))


@pytest.mark.parametrize("function", ZSCORES, ids=NAMES.get)
@given(rewards=rewards(), exponent=st.sampled_from([-300, -200, -20, -1, 1, 20, 200, 300]))
def test_a_zscore_has_no_unit(function, rewards, exponent) -> None:
    # 10⁻³⁰⁰ squared underflows and 10³⁰⁰ squared overflows: neither square may be taken.
    assert_same(function(rewards * 10.0**exponent), function(rewards))


@each_relative
@given(rewards=rewards())
def test_advantages_sum_to_zero(function, rewards) -> None:
    totals = function(rewards).sum() if function is batch_centred else function(rewards).sum(dim=1)
    assert_same(totals, torch.zeros_like(totals))


@pytest.mark.parametrize(("function", "lost_degrees"), [(group_zscore, 0), (SAMPLE, 1)], ids=["population", "sample"])
@given(rewards=rewards())
def test_a_zscore_has_unit_deviation_in_every_informative_group(function, lost_degrees, rewards) -> None:
    kept = informative(rewards)
    degrees = (~rewards.isnan()).sum(dim=1).double() - lost_degrees
    assert_same(function(rewards).square().sum(dim=1), torch.where(kept, degrees, 0.0))


@given(rewards=rewards(missing=False))
def test_a_zscore_is_the_centred_reward_rescaled_within_its_group(rewards) -> None:
    deviation = rewards.std(dim=1, correction=0, keepdim=True)
    assert_same(group_zscore(rewards) * deviation, group_centred(rewards))


@pytest.mark.parametrize("function", EVERY, ids=NAMES.get)
@given(rewards=rewards())
def test_an_unscored_rollout_is_as_good_as_absent(function, rewards) -> None:
    whole = function(rewards)
    assert torch.all(whole[rewards.isnan()] == 0)
    if function is batch_centred:
        kept = ~rewards.isnan()
        if kept.any():
            assert_same(whole[kept], function(rewards[kept][None])[0])
        return
    for row, advantages in zip(rewards, whole, strict=True):
        kept = ~row.isnan()
        if kept.any():
            assert_same(advantages[kept], function(row[kept][None])[0])


@each_relative
@given(rewards=rewards())
def test_a_higher_reward_never_has_a_lower_advantage(function, rewards) -> None:
    for row, advantages in zip(rewards, function(rewards), strict=True):
        kept = ~row.isnan()
        order = row[kept].argsort()
        assert torch.all(advantages[kept][order].diff() >= -1e-12)


@given(rewards=rewards())
def test_a_group_is_informative_exactly_when_an_advantage_is_not_zero(rewards) -> None:
    assert torch.equal(informative(rewards), (group_zscore(rewards) != 0).any(dim=1))


@given(rewards(), st.floats(1e-3, 1e3))
def test_over_the_mean_neither_the_unit_of_rewards_nor_anything_beyond_the_group_matters(values, unit) -> None:
    values = values.abs()
    given_to_each = over_mean(values)
    assert_same(over_mean(unit * values), given_to_each)
    assert_same(torch.cat([over_mean(row[None]) for row in values]), given_to_each)
    assert_same(given_to_each.sum(dim=1), torch.zeros(len(values), dtype=torch.float64))
    assert (given_to_each >= -1 - 1e-12).all()
    assert (given_to_each <= values.shape[1] - 1 + 1e-12).all()
