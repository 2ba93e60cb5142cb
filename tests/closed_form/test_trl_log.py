"""What TRL's log says of rewards and of clipped tokens under each rule, by hand."""

import pytest
import torch

from posttrain.records import Grades
from posttrain.trl import GRPOConfig
from posttrain.trl.log_entries import Entry, logged_by, share_without_deviation, taken_entry, token_entry

FIRST, SECOND = [[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.5, 0.5]]
"""Scores of two functions, each over two groups of two."""


def grades(*weights: float) -> Grades:
    scores, counts = torch.tensor([FIRST, SECOND], dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    return Grades(
        names=("first", "second"), scores=scores, weights=counts, rewards=(counts[:, None, None] * scores).sum(dim=0)
    )


@pytest.mark.parametrize(
    ("given", "weights", "share"),
    [
        ({}, (1, 1), 1.0),  # sums 1, 1 and 1.5, 1.5
        ({}, (1, 0.5), 0.5),  # 1, .5 and 1.25, 1.25
        ({"scale_rewards": "batch"}, (1, 1), 0.0),  # 1, 1, 1.5, 1.5 differ
        ({"multi_objective_aggregation": "normalize_then_sum"}, (1, 1), 1.0),  # z and -z; nothing differs in group 2
        ({"multi_objective_aggregation": "normalize_then_sum"}, (1, 0.5), 0.0),  # z - z/2: all four have a deviation
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"}, (1, 0.5), 0.0),
    ],
)
def test_the_share_without_deviation_is_of_what_is_divided(given, weights, share) -> None:
    assert share_without_deviation(grades(*weights), logged_by(GRPOConfig(**given)).zero_deviation) == share


def test_shares_of_clipped_tokens_are_of_all_tokens_and_have_the_name_of_the_loss() -> None:
    ours = {"kl": 0.1, "clip_ratio/low_mean": 0.2, "clip_ratio/high_mean": 0.4, "clip_ratio/region_mean": 0.6}
    assert token_entry(ours, logged_by(GRPOConfig()), trained_share=0.5) == {
        "kl": 0.1, "clip_ratio/low_mean": 0.1, "clip_ratio/high_mean": 0.2, "clip_ratio/region_mean": 0.3,
    }  # fmt: skip
    cispo = logged_by(GRPOConfig(loss_type="cispo", epsilon_high=5.0))
    assert token_entry(ours, cispo, trained_share=0.5) == {"kl": 0.1, "cispo_clip_ratio": 0.2}


def test_an_entry_of_several_steps_has_means_and_of_counts_the_last() -> None:
    steps: list[Entry] = [
        {"reward": 1.0, "num_tokens": 10.0, "learning_rate": 0.3, "grad_norm": 2.0, "kl": None},
        {"reward": 2.0, "num_tokens": 40.0, "learning_rate": 0.1, "grad_norm": 4.0, "kl": 0.5},
    ]
    assert taken_entry(steps) == {"reward": 1.5, "num_tokens": 40.0, "learning_rate": 0.1, "grad_norm": 4.0, "kl": 0.5}
    assert taken_entry(steps) == {}
