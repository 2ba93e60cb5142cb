"""Advantages by hand.  The values are worked out in the comments."""

import math

import pytest
import torch

from posttrain.algorithms.advantages import (
    batch_centred,
    batch_scaled,
    group_centred,
    group_zscore,
    informative,
    leave_one_out,
    over_mean,
    raw,
)

NAN = math.nan


def rows(*rewards: list[float]) -> torch.Tensor:
    return torch.tensor(rewards, dtype=torch.float64)


def assert_exact(actual: torch.Tensor, *expected: list[float]) -> None:
    torch.testing.assert_close(actual, rows(*expected), rtol=1e-14, atol=1e-14)


def test_three_rewards_centre_on_their_mean() -> None:
    # Mean of (2, 1, -1) = 2/3.
    assert_exact(group_centred(rows([2, 1, -1])), [4 / 3, 1 / 3, -5 / 3])


def test_four_rewards_centre_on_their_mean() -> None:
    # Mean of (1, -0.5, 1, -1) = 0.5 / 4 = 0.125.
    assert_exact(group_centred(rows([1, -0.5, 1, -1])), [0.875, -0.625, 0.875, -1.125])


def test_half_right_half_wrong_under_the_sample_deviation() -> None:
    # Centred ±1/2; sample variance 8 · (1/4) / 7 = 2/7, so ±(1/2)·√(7/2) = ±√(7/8) = ±0.9354.
    right, wrong = math.sqrt(7 / 8), -math.sqrt(7 / 8)
    assert right == pytest.approx(0.9354, abs=5e-5)
    advantages = group_zscore(rows([1, 1, 1, 1, 0, 0, 0, 0]), deviation="sample")
    assert_exact(advantages, [right] * 4 + [wrong] * 4)


def test_the_population_deviation_is_the_default() -> None:
    # Centred (3, -1, -1, -1) / 4; population variance (9 + 1 + 1 + 1) / 16 / 4 = 3/16, deviation √3/4.
    assert_exact(group_zscore(rows([1, 0, 0, 0])), [3 / math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)


def test_an_epsilon_is_added_to_the_deviation_in_units_of_reward() -> None:
    # Centred (3, -1, -1, -1) / 4 and deviation √3/4; with ε = √3/4 twice that.  In units of 100, ε stays what it is.
    halved = [3 / math.sqrt(3) / 2] + [-1 / math.sqrt(3) / 2] * 3
    assert_exact(group_zscore(rows([1, 0, 0, 0]), epsilon=math.sqrt(3) / 4), halved)
    assert_exact(group_zscore(rows([100, 0, 0, 0]), epsilon=100 * math.sqrt(3) / 4), halved)


def test_equal_rewards_are_zero_whatever_is_added_to_the_deviation() -> None:
    # In float32 the mean of three times .9 misses it by an ulp, 6e-8, and 6e-8 / (7e-8 + 1e-4) is 6e-4.
    equal = torch.full((2, 3), 0.9)
    written_out = (equal - equal.mean(dim=1, keepdim=True)) / (equal.std(dim=1, keepdim=True) + 1e-4)
    assert written_out.abs().max().item() == pytest.approx(6e-4, rel=0.01)
    assert torch.equal(group_zscore(equal, deviation="sample", epsilon=1e-4), torch.zeros(2, 3))
    assert torch.equal(batch_scaled(equal, deviation="sample", epsilon=1e-4), torch.zeros(2, 3))


def test_the_deviation_of_the_batch_is_that_of_all_rewards_about_their_mean() -> None:
    # Of (0, 1, 3, 8), mean 3: squares 9 + 4 + 0 + 25 = 38, variance 38/4.  The groups centre to ∓1/2 and ∓5/2.
    d = math.sqrt(38 / 4)
    assert_exact(batch_scaled(rows([0, 1], [3, 8])), [-0.5 / d, 0.5 / d], [-2.5 / d, 2.5 / d])
    # By 38/3 with the sample's, and 1 more for ε; one that nothing scored is not counted.
    d = math.sqrt(38 / 3) + 1
    scaled = batch_scaled(rows([0, 1, NAN], [3, NAN, 8]), deviation="sample", epsilon=1.0)
    assert_exact(scaled, [-0.5 / d, 0.5 / d, 0], [-2.5 / d, 0, 2.5 / d])
    # The usual rewards: of (0, 1, 0, 0), mean 1/4, deviation √3/4; the first group centres to ∓1/2.
    half = 2 / math.sqrt(3)
    assert_exact(batch_scaled(rows([0, 1], [0, 0])), [-half, half], [0, 0])


def test_a_group_of_equal_rewards_is_zero_under_the_deviation_of_the_batch() -> None:
    # Of (2, 2, 0, 4), mean 2: variance 8/4.
    assert_exact(batch_scaled(rows([2, 2], [0, 4])), [0, 0], [-math.sqrt(2), math.sqrt(2)])
    assert torch.equal(batch_scaled(rows([NAN, 3.0])), torch.zeros(1, 2, dtype=torch.float64))


def test_each_group_has_statistics_of_its_own() -> None:
    # (0, 1): mean 1/2, deviation 1/2.  (10, 40): mean 25, deviation 15.
    assert_exact(group_zscore(rows([0, 1], [40, 10])), [-1, 1], [1, -1])
    assert_exact(group_centred(rows([0, 1], [40, 10])), [-0.5, 0.5], [15, -15])


def test_the_batch_mean_is_taken_over_all_prompts() -> None:
    # Mean of (0, 1, 3, 8) = 3.
    assert_exact(batch_centred(rows([0, 1], [3, 8])), [-3, -2], [0, 5])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    # 2 - (1 - 1)/2 = 2;  1 - (2 - 1)/2 = 1/2;  -1 - (2 + 1)/2 = -5/2.
    assert_exact(leave_one_out(rows([2, 1, -1])), [2, 0.5, -2.5])


def test_raw_rewards_pass_through() -> None:
    assert_exact(raw(rows([2, -1.5], [0.25, 3])), [2, -1.5], [0.25, 3])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (raw, [3, 0, 1, 2]),
        (batch_centred, [1, 0, -1, 0]),  # mean of (3, 1, 2) = 2
        (group_centred, [1, 0, -1, 0]),
        (group_zscore, [math.sqrt(3 / 2), 0, -math.sqrt(3 / 2), 0]),  # variance 2/3 over the three
        (leave_one_out, [1.5, 0, -1.5, 0]),  # 3 - (1 + 2)/2, 1 - (3 + 2)/2, 2 - (3 + 1)/2
    ],
)
def test_an_unscored_rollout_leaves_the_statistics_and_gets_zero(function, expected) -> None:
    assert_exact(function(rows([3, NAN, 1, 2])), expected)


def test_a_group_with_one_scored_rollout_has_no_siblings_to_compare_with() -> None:
    lonely = rows([NAN, 5, NAN], [NAN, NAN, NAN])
    for function in (group_centred, group_zscore, leave_one_out):
        assert torch.equal(function(lonely), torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(group_zscore(lonely, deviation="sample"), torch.zeros(2, 3, dtype=torch.float64))


def test_a_group_is_informative_when_two_of_its_rewards_differ() -> None:
    groups = rows([1, 1, 1], [0, 1, 1], [NAN, 0.3, 0.3], [NAN, 2, 1], [NAN, NAN, 1], [NAN, NAN, NAN])
    assert informative(groups).tolist() == [False, True, False, True, False, False]


def test_the_centred_reward_over_the_mean_of_its_group() -> None:
    # Means 1/4, 3/4 and 2: a lone success among four has 3, a lone failure -1, and (1, 2, 3) has -1/2, 0, 1/2.
    assert_exact(over_mean(rows([1, 0, 0, 0], [1, 1, 0, 1])), [3, -1, -1, -1], [1 / 3, 1 / 3, -1, 1 / 3])
    assert_exact(over_mean(rows([1, 2, 3])), [-0.5, 0, 0.5])
    # Unscored rollouts leave the mean, 1/2; with one scored there is nothing to compare.
    assert_exact(over_mean(rows([1, NAN, 0, NAN], [1, NAN, NAN, NAN])), [1, 0, -1, 0], [0, 0, 0, 0])


def test_a_group_whose_mean_reward_is_0_teaches_exactly_nothing() -> None:
    assert torch.equal(over_mean(rows([0, 0, 0], [NAN, NAN, NAN])), torch.zeros(2, 3, dtype=torch.float64))
    # However small the mean is, a lone success has G - 1.
    assert_exact(over_mean(rows([1e-300, 0, 0])), [2, -1, -1])
