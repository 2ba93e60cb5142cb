"""Advantages, the groups that have any, and token weights by hand.  The values are worked out in the comments."""

import math
from dataclasses import replace

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
    scores_differ,
    sums_differ,
    totals_differ,
)
from posttrain.algorithms.losses import constant_length, mean_over_sequences, mean_over_tokens, sum_over_sequence
from posttrain.algorithms.table import build_algorithm
from posttrain.records import Finish, Grades, Marks
from tests.support.sequences import doubles, grades_of, resampled
from tests.support.tiny import batch_of, written_group

NAN = math.nan
ROOT3, ROOT_3_2, ROOT_7_8 = math.sqrt(3), math.sqrt(3 / 2), math.sqrt(7 / 8)
SPREAD, WITH_EPSILON = math.sqrt(38 / 4), math.sqrt(38 / 3) + 1
LONELY = [[NAN, 5, NAN], [NAN, NAN, NAN]]
"""One scored rollout has no siblings to compare with."""


@pytest.mark.parametrize(
    ("function", "options", "rewards", "expected"),
    [
        (raw, {}, [[2, -1.5], [0.25, 3]], [[2, -1.5], [0.25, 3]]),
        # Means 2/3 and .125.
        (group_centred, {}, [[2, 1, -1]], [[4 / 3, 1 / 3, -5 / 3]]),
        (group_centred, {}, [[1, -0.5, 1, -1]], [[0.875, -0.625, 0.875, -1.125]]),
        # Each group has its own statistics: means 1/2 and 25, deviations 1/2 and 15.
        (group_centred, {}, [[0, 1], [40, 10]], [[-0.5, 0.5], [15, -15]]),
        (group_zscore, {}, [[0, 1], [40, 10]], [[-1, 1], [1, -1]]),
        # Centred ±1/2; sample variance 8 · (1/4) / 7 = 2/7, so ±(1/2)·√(7/2) = ±√(7/8).
        (group_zscore, {"deviation": "sample"}, [[1] * 4 + [0] * 4], [[ROOT_7_8] * 4 + [-ROOT_7_8] * 4]),
        # The population's deviation is the default: (3, -1, -1, -1) / 4 over √(3/16).
        (group_zscore, {}, [[1, 0, 0, 0]], [[ROOT3] + [-1 / ROOT3] * 3]),
        # ε is added in units of reward: √3/4 doubles the deviation, and 100 times that doubles it in units of 100.
        (group_zscore, {"epsilon": ROOT3 / 4}, [[1, 0, 0, 0]], [[ROOT3 / 2] + [-1 / ROOT3 / 2] * 3]),
        (group_zscore, {"epsilon": 25 * ROOT3}, [[100, 0, 0, 0]], [[ROOT3 / 2] + [-1 / ROOT3 / 2] * 3]),
        # All rewards (0, 1, 3, 8) have mean 3 and squares 9 + 4 + 0 + 25; groups centre to ∓1/2 and ∓5/2.
        (batch_centred, {}, [[0, 1], [3, 8]], [[-3, -2], [0, 5]]),
        (batch_scaled, {}, [[0, 1], [3, 8]], [[-0.5 / SPREAD, 0.5 / SPREAD], [-2.5 / SPREAD, 2.5 / SPREAD]]),
        # By 38/3 with the sample's, and 1 more for ε; one that nothing scored is not counted.
        (
            batch_scaled,
            {"deviation": "sample", "epsilon": 1.0},
            [[0, 1, NAN], [3, NAN, 8]],
            [[-0.5 / WITH_EPSILON, 0.5 / WITH_EPSILON, 0], [-2.5 / WITH_EPSILON, 0, 2.5 / WITH_EPSILON]],
        ),
        # The usual rewards: of (0, 1, 0, 0) the mean is 1/4 and the deviation √3/4.
        (batch_scaled, {}, [[0, 1], [0, 0]], [[-2 / ROOT3, 2 / ROOT3], [0, 0]]),
        # A group of equal rewards is zero: of (2, 2, 0, 4), mean 2, the variance is 8/4.
        (batch_scaled, {}, [[2, 2], [0, 4]], [[0, 0], [-math.sqrt(2), math.sqrt(2)]]),
        (batch_scaled, {}, [[NAN, 3.0]], [[0, 0]]),
        # 2 - (1 - 1)/2, 1 - (2 - 1)/2, -1 - (2 + 1)/2.
        (leave_one_out, {}, [[2, 1, -1]], [[2, 0.5, -2.5]]),
        # Means 1/4, 3/4 and 2: a lone success among four has 3, a lone failure -1.
        (over_mean, {}, [[1, 0, 0, 0], [1, 1, 0, 1]], [[3, -1, -1, -1], [1 / 3, 1 / 3, -1, 1 / 3]]),
        (over_mean, {}, [[1, 2, 3]], [[-0.5, 0, 0.5]]),
        # Unscored rollouts leave the mean, 1/2; with one scored there is nothing to compare.
        (over_mean, {}, [[1, NAN, 0, NAN], [1, NAN, NAN, NAN]], [[1, 0, -1, 0], [0, 0, 0, 0]]),
        # A mean of 0 teaches nothing; however small it is, a lone success has G - 1.
        (over_mean, {}, [[0, 0, 0], [NAN, NAN, NAN]], [[0, 0, 0], [0, 0, 0]]),
        (over_mean, {}, [[1e-300, 0, 0]], [[2, -1, -1]]),
        # An unscored rollout leaves the statistics and gets zero.
        (raw, {}, [[3, NAN, 1, 2]], [[3, 0, 1, 2]]),
        (batch_centred, {}, [[3, NAN, 1, 2]], [[1, 0, -1, 0]]),
        (group_centred, {}, [[3, NAN, 1, 2]], [[1, 0, -1, 0]]),
        (group_zscore, {}, [[3, NAN, 1, 2]], [[ROOT_3_2, 0, -ROOT_3_2, 0]]),  # variance 2/3 over the three
        (leave_one_out, {}, [[3, NAN, 1, 2]], [[1.5, 0, -1.5, 0]]),  # 3 - (1 + 2)/2, 1 - (3 + 2)/2, 2 - (3 + 1)/2
        *[(each, {}, LONELY, [[0] * 3] * 2) for each in (group_centred, group_zscore, leave_one_out)],
        (group_zscore, {"deviation": "sample"}, LONELY, [[0] * 3] * 2),
    ],
)
def test_the_advantages_of_rewards(function, options, rewards, expected) -> None:
    torch.testing.assert_close(function(doubles(*rewards), **options), doubles(*expected), rtol=1e-14, atol=1e-14)


def test_equal_rewards_are_zero_whatever_is_added_to_the_deviation() -> None:
    # In float32 the mean of three times .9 misses it by an ulp, 6e-8, and 6e-8 / (7e-8 + 1e-4) is 6e-4.
    equal = torch.full((2, 3), 0.9)
    written_out = (equal - equal.mean(dim=1, keepdim=True)) / (equal.std(dim=1, keepdim=True) + 1e-4)
    assert written_out.abs().max().item() == pytest.approx(6e-4, rel=0.01)
    for function in (group_zscore, batch_scaled):
        assert torch.equal(function(equal, deviation="sample", epsilon=1e-4), torch.zeros(2, 3))


def test_a_group_is_informative_when_two_of_its_rewards_differ() -> None:
    groups = doubles([1, 1, 1], [0, 1, 1], [NAN, 0.3, 0.3], [NAN, 2, 1], [NAN, NAN, 1], [NAN, NAN, NAN])
    assert informative(groups).tolist() == [False, True, False, True, False, False]


def graded(scores: list[list[list[float]]], *weights: float, marks: dict[str, object] | None = None) -> Grades:
    """Scores by function, prompt and sample; a reward is their weighted sum."""
    table, counts = doubles(*scores), doubles(*weights)
    rewards = torch.einsum("f,fpg->pg", counts, table)
    return grades_of(rewards, table, names=("a", "b"), weights=counts, marks=marks or {})


def test_any_function_that_counts_may_tell_two_rollouts_apart() -> None:
    """Three prompts: the sum differs; two functions cancel in the sum; only what does not count differs."""
    scores = [[[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]
    for weights, differ in (
        ((1.0, 1.0), [True, True, True]),
        ((1.0, 0.0), [True, True, False]),
        ((0.0, 1.0), [False, True, True]),
        ((0.0, 0.0), [False, False, False]),
    ):
        assert scores_differ(graded(scores, *weights)).tolist() == differ
    assert sums_differ(graded(scores, 1.0, 1.0)).tolist() == [True, False, True]
    assert sums_differ(graded(scores, 0.0, 0.0)).tolist() == [False, False, False]


def test_steps_of_a_scored_rollout_and_of_a_function_that_counts_are_information() -> None:
    """Four prompts of equal rewards: no marks; a mark of a; a mark of b; a mark of a in what nothing scored."""
    mark, none = Marks(tokens=(0.5, None)), None
    same = [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, NAN]]
    marks = {
        "a": ((none, none), (none, mark), (none, none), (none, mark)),
        "b": ((none, none), (none, none), (mark, none), (none, none)),
    }
    both = graded([same, same], 1.0, 1.0, marks=marks)
    assert sums_differ(both).tolist() == totals_differ(both).tolist() == [False, True, True, False]
    assert sums_differ(graded([same, same], 1.0, 0.0, marks=marks)).tolist()[:3] == [False, True, False]
    assert totals_differ(graded([same, same], 1.0, 1.0, marks={"a": ((mark, mark),) * 4})).tolist() == [False] * 4


# Token weights, for completions of 1, 3 and 4 tokens under a limit of 10.


ALL, WITHOUT_SECOND = [True, True, True], [True, False, True]
RULES = (mean_over_tokens, mean_over_sequences, sum_over_sequence, constant_length)


@pytest.mark.parametrize(
    ("rule", "scored", "expected"),
    [
        (mean_over_tokens, ALL, [1 / 8, 1 / 8, 1 / 8]),  # 1 + 3 + 4 tokens
        (mean_over_sequences, ALL, [1 / 3, 1 / 9, 1 / 12]),  # a third each, shared by 1, 3 and 4 tokens
        (sum_over_sequence, ALL, [1 / 3, 1 / 3, 1 / 3]),
        (constant_length, ALL, [1 / 30, 1 / 30, 1 / 30]),  # 3 completions × limit 10
        (mean_over_tokens, WITHOUT_SECOND, [1 / 5, 0, 1 / 5]),  # 1 + 4 tokens
        (mean_over_sequences, WITHOUT_SECOND, [1 / 2, 0, 1 / 8]),
        (sum_over_sequence, WITHOUT_SECOND, [1 / 2, 0, 1 / 2]),
        (constant_length, WITHOUT_SECOND, [1 / 20, 0, 1 / 20]),
        *[(rule, [False] * 3, [0, 0, 0]) for rule in RULES],
    ],
)
def test_the_weight_of_a_token(rule, scored, expected) -> None:
    weights = rule(torch.tensor([1, 3, 4]), torch.tensor(scored), max_completion_tokens=10)
    torch.testing.assert_close(weights, doubles(*expected), rtol=1e-15, atol=0)


@pytest.mark.parametrize("rule", RULES[:2])
def test_the_weights_of_all_tokens_sum_to_one(rule) -> None:
    lengths = torch.tensor([7, 1, 250, 31])
    weights = rule(lengths, torch.tensor([True, True, False, True]), max_completion_tokens=256)
    assert (weights * lengths).sum().item() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mean_over_tokens", [1 / 5, 1 / 5]),  # 1 + 4 tokens that are learned
        ("mean_over_sequences", [1 / 3, 1 / 12]),  # a third each: the one that was cut off is counted
        ("sum_over_sequence", [1 / 3, 1 / 3]),
        ("constant_length", [1 / 48, 1 / 48]),  # 3 completions × limit 16
    ],
)
def test_a_completion_that_was_cut_off_has_no_weight_and_counts_as_one_where_it_is_masked(rule, expected) -> None:
    algorithm = build_algorithm({"name": "grpo", "token_weights": rule, "mask_truncated": True})
    whole = written_group([1], [[2], [3, 4, 5], [6, 7, 8, 9]])
    first, second, third = whole.rollouts
    group = replace(whole, rollouts=(first, resampled(second, finish=Finish.LENGTH), third))
    batch = batch_of([group], [[1.0, 2.0, -3.0]], algorithm, masks_truncated=algorithm.masks_truncated)
    assert batch.completions == ((2,), (6, 7, 8, 9))
    one, four = expected
    torch.testing.assert_close(batch.columns.weights, doubles(one, *[four] * 4), rtol=1e-15, atol=0)
    assert len(batch_of([group], [[1.0, 2.0, -3.0]], algorithm).completions) == 3, "where it is not"
    cut = replace(whole, rollouts=tuple(resampled(each, finish=Finish.LENGTH) for each in whole.rollouts))
    assert batch_of([cut], [[1.0, -1.0, 0.5]], algorithm, masks_truncated=True).completions == ()


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_completions_that_were_cut_off_are_masked_where_that_is_asked_for(name) -> None:
    for asked in (False, True):
        given = {"mask_truncated": True} if asked else {}
        assert build_algorithm({"name": name, **given}).masks_truncated == asked
