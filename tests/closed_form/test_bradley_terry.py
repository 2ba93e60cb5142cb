"""The loss of reward models: closed forms, slopes, and the same numbers as the preferences of inverse RL."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.algorithms.preference_losses import bradley_terry, centring
from posttrain.irl.preferences import BradleyTerry

STEP = 1e-6


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "expected"),
    [
        (1.5, 1.5, 0.0, math.log(2)),  # equal scores tell nothing: P = 1/2
        (math.log(3), 0.0, 0.0, math.log(4 / 3)),  # P = 3/4
        (0.0, math.log(3), 0.0, math.log(4)),  # P = 1/4
        (math.log(3), 0.0, math.log(3), math.log(2)),  # the margin is all that there is
        (5.0, 5.0, 1000.0, 1000.0),  # far on the wrong side the loss is the distance
        (-2.0, 800.0, 0.0, 802.0),
        (800.0, -2.0, 0.0, 0.0),
    ],
)
def test_the_loss_of_a_pair(chosen: float, rejected: float, margin: float, expected: float) -> None:
    found = bradley_terry(numbers(chosen), numbers(rejected), numbers(margin))
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_centring_charges_for_the_sum_and_not_for_the_difference() -> None:
    # (1 + 2)² = 9, (3 - 3)² = 0, (-1 - 1)² = 4
    assert centring(numbers(1, 3, -1), numbers(2, -3, -1)).tolist() == [9, 0, 4]


def test_slopes_are_those_of_finite_differences_and_of_the_formula() -> None:
    chosen, rejected, margins = numbers(0.3, -1.2, 4.0), numbers(0.5, -2.0, 1.0), numbers(0.0, 1.5, 0.2)
    at = chosen.clone().requires_grad_()
    bradley_terry(at, rejected, margins).sum().backward()
    assert at.grad is not None
    for row in range(3):
        nudge = torch.zeros(3, dtype=torch.float64)
        nudge[row] = STEP
        up, down = (bradley_terry(chosen + sign * nudge, rejected, margins).sum() for sign in (1, -1))
        assert at.grad[row].item() == pytest.approx(((up - down) / (2 * STEP)).item(), rel=1e-7)
    # dL/dr_c = -σ(m - (r_c - r_r)), written here as -1/(1 + e^(r_c - r_r - m))
    assert at.grad.tolist() == pytest.approx((-1 / (1 + torch.exp(chosen - rejected - margins))).tolist(), rel=1e-12)


def test_only_the_difference_counts_so_that_a_shift_of_both_changes_nothing() -> None:
    chosen, rejected, margins = numbers(0.3, -1.0), numbers(2.0, 0.25), numbers(0.5, 0.0)
    expected = bradley_terry(chosen, rejected, margins).tolist()
    assert bradley_terry(chosen + 8, rejected + 8, margins).tolist() == pytest.approx(expected, rel=1e-12)


def test_it_is_the_likelihood_that_inverse_rl_fits_to_preferences() -> None:
    # There a path's score is θ·φ; with two features the scores of three pairs are θ·Δφ apart.
    theta, differences = np.array([0.7, -0.4]), np.array([[1.0, 2.0], [-3.0, 0.5], [0.0, 1.0]])
    objective = BradleyTerry(differences, temperature=1.0, share=1 / 3)
    chosen = torch.from_numpy(differences @ theta)
    found = bradley_terry(chosen, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert found.mean().item() == pytest.approx(objective.value(theta), rel=1e-12)
