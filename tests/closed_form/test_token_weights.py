"""Token weights by hand, for completions of 1, 3 and 4 tokens under a limit of 10."""

from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.token_weights import constant_length, mean_over_sequences, mean_over_tokens, sum_over_sequence
from posttrain.records import Finish
from tests.support.sequences import resampled
from tests.support.tiny import batch_of, written_group

ALL = [True, True, True]
WITHOUT_SECOND = [True, False, True]


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
    ],
)
def test_the_weight_of_a_token(rule, scored, expected) -> None:
    weights = rule(torch.tensor([1, 3, 4]), torch.tensor(scored), max_completion_tokens=10)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("rule", [mean_over_tokens, mean_over_sequences, sum_over_sequence, constant_length])
def test_an_update_without_a_scored_rollout_weighs_nothing(rule) -> None:
    weights = rule(torch.tensor([2, 5]), torch.tensor([False, False]), max_completion_tokens=10)
    assert torch.equal(weights, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("rule", [mean_over_tokens, mean_over_sequences])
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
    by_token = [weight for weight, length in zip(expected, (1, 4), strict=True) for _ in range(length)]
    torch.testing.assert_close(batch.columns.weights, torch.tensor(by_token, dtype=torch.float64), rtol=1e-15, atol=0)
    assert len(batch_of([group], [[1.0, 2.0, -3.0]], algorithm).completions) == 3, "where it is not"


@pytest.mark.parametrize("rule", ["mean_over_tokens", "mean_over_sequences"])
def test_a_step_of_nothing_but_cut_off_completions_is_empty_where_they_are_masked(rule) -> None:
    algorithm = build_algorithm({"name": "grpo", "token_weights": rule})
    whole = written_group([1], [[2], [3, 4]])
    group = replace(whole, rollouts=tuple(resampled(each, finish=Finish.LENGTH) for each in whole.rollouts))
    assert batch_of([group], [[1.0, -1.0]], algorithm, masks_truncated=True).completions == ()


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_completions_that_were_cut_off_are_masked_where_that_is_asked_for(name) -> None:
    assert [build_algorithm({"name": name, **asked}).masks_truncated for asked in ({}, {"mask_truncated": True})] == [
        False,
        True,
    ]
