"""A step's metrics from the reports of its updates: sums over tokens are added up and divided once."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.training.metrics import UpdateReport, update_metrics

# One update of one token and one of three.
FIRST = UpdateReport(
    loss=1.0,
    grad_norms={"policy": 2.0, "value_head": 0.5},
    learning_rate=0.1,
    num_micro_batches=1,
    num_tokens=1,
    num_completions=1,
    sums={"sampling/sampling_logp_difference/mean": 0.25, "ratio/mean": 1.0, "kl": 8.0},
    completion_sums={"clip_ratio/low_mean": 1.0},
    ratio_range=(0.9, 1.0),
    gaps=torch.tensor([0.25], dtype=torch.float64),
)
SECOND = UpdateReport(
    loss=4.0,
    grad_norms={"policy": 3.0, "value_head": 1.5},
    learning_rate=0.05,
    num_micro_batches=2,
    num_tokens=3,
    num_completions=2,
    sums={"sampling/sampling_logp_difference/mean": 9.0, "ratio/mean": 6.0, "kl": 12.0},
    completion_sums={"clip_ratio/low_mean": 0.5},
    ratio_range=(0.5, 4.0),
    gaps=torch.tensor([1.0, 5.0, 3.0], dtype=torch.float64),
)


def test_means_over_tokens_are_over_those_of_all_updates_together() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["tokens/trained"] == 4
    # (8 + 12) / 4, where the mean of the two means is (8 + 4) / 2; and (1 + 6) / 4.
    assert metrics["kl"] == 5
    assert metrics["ratio/mean"] == 1.75


def test_means_over_completions_are_over_those_of_all_updates_together() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["completions/trained"] == 3
    assert metrics["clip_ratio/low_mean"] == 0.5  # (1 + .5) / 3, where the mean of the two means is (1 + .25) / 2


def test_what_is_no_mean_over_tokens_is_taken_as_it_should_be() -> None:
    metrics = update_metrics([FIRST, SECOND])
    assert (metrics["ratio/min"], metrics["ratio/max"]) == (0.5, 4)
    assert metrics["loss"] == 2.5  # over updates, as the norms
    assert (metrics["grad_norm/policy"], metrics["grad_norm/value_head"]) == (2.5, 1)
    # Of both as one vector: √(2² + ½²) and √(3² + 1.5²).
    assert metrics["grad_norm"] == pytest.approx((math.sqrt(4.25) + math.sqrt(11.25)) / 2, rel=1e-14)
    assert metrics["learning_rate"] == 0.05  # the last
    assert metrics["num_micro_batches"] == 3


def test_the_gap_between_sampler_and_trainer_is_that_of_the_first_update() -> None:
    # Only there have both the same weights.
    metrics = update_metrics([FIRST, SECOND])
    assert metrics["sampling/sampling_logp_difference/mean"] == 0.25
    assert metrics["sampling/sampling_logp_difference/max"] == 0.25
    turned = update_metrics([SECOND, FIRST])
    assert turned["sampling/sampling_logp_difference/mean"] == 3  # 9 / 3
    assert turned["sampling/sampling_logp_difference/max"] == 5
    assert turned["kl"] == metrics["kl"]


@pytest.mark.parametrize("module", ["policy", "body"])
def test_the_norm_of_the_only_module_is_told_once(module: str) -> None:
    metrics = update_metrics([replace(FIRST, grad_norms={module: 0.1}), replace(SECOND, grad_norms={module: 0.3})])
    assert metrics["grad_norm"] == (0.1 + 0.3) / 2
    assert [name for name in metrics if name.startswith("grad_norm")] == ["grad_norm"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_how_the_tokens_are_dealt_out_to_updates_changes_no_mean(cut: int) -> None:
    numbers = [0.5, 2.0, 8.0, 1.5]
    reports = [
        UpdateReport(
            loss=0.0,
            grad_norms={"policy": 1.0},
            learning_rate=0.1,
            num_micro_batches=1,
            num_tokens=len(part),
            num_completions=1,
            completion_sums={},
            sums={"sampling/sampling_logp_difference/mean": 0.0, "entropy": sum(part)},
            ratio_range=(1.0, 1.0),
            gaps=torch.zeros(len(part), dtype=torch.float64),
        )
        for part in (numbers[:cut], numbers[cut:])
    ]
    assert update_metrics(reports)["entropy"] == 3  # 12 / 4


def test_a_step_without_an_update_has_none() -> None:
    assert update_metrics([]) == {}
