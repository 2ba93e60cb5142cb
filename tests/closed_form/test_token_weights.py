"""Token weights by hand, for completions of 1, 3 and 4 tokens under a limit of 10."""

import pytest
import torch

from posttrain.algorithms.token_weights import constant_length, mean_over_sequences, mean_over_tokens, sum_over_sequence

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
