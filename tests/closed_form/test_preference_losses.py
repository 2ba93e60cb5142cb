"""Losses of pairs and of reward models by hand.  The two pairs of most tests have gaps h of 2 and -1.5 nats."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    OfPairs,
    PairObjective,
    bradley_terry,
    centring,
    hinge,
    ipo,
    log_ratios,
    per_token,
    ranked_right,
    sigmoid,
    smoothed,
    unbiased,
)
from posttrain.irl.preferences import BradleyTerry
from posttrain.training.pair_updates import MeasuredPairs


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


POLICY = OfPairs(values(-4, -10), values(-7, -6))
REFERENCE = OfPairs(values(-5, -9), values(-6, -6.5))
LENGTHS = OfPairs(values(2, 5), values(4, 2))
GAPS = values(2, -1.5)  # (1 - -1) and (-1 - .5)


def losses(**options: object) -> list[float]:
    return PairObjective(**options).losses(POLICY, REFERENCE, LENGTHS).tolist()


def test_log_ratios_are_of_each_answer() -> None:
    assert [each.tolist() for each in log_ratios(POLICY, REFERENCE)] == [[1, -1], [-1, 0.5]]


def test_the_sigmoid_loss() -> None:
    # β h = .5 and -.375: log(1 + e^-.5) = log 1.6065307 = .4740770, log(1 + e^.375) = log 2.4549914 = .8981233.
    assert losses(beta=0.25) == pytest.approx([0.4740769842, 0.8981232641], abs=1e-9)


def test_the_hinge_loss_is_zero_once_the_gap_is_one_over_beta() -> None:
    # 1 - .5, 1 + .375;  with β = 1 the first gap of 2 is beyond 1.
    assert losses(loss=hinge, beta=0.25) == [0.5, 1.375]
    assert hinge(GAPS, beta=1.0).tolist() == [0, 2.5]


def test_ipo_wants_a_gap_of_one_over_two_beta() -> None:
    # 1/(2 · .25) = 2: (2 - 2)² = 0 and (-1.5 - 2)² = 12.25; with β = .1 the target is 5: 9 and 42.25.
    assert losses(loss=ipo, beta=0.25) == [0, 12.25]
    assert losses(loss=ipo, beta=0.1) == pytest.approx([9, 42.25], rel=1e-14)


def test_means_per_token_divide_each_answer_by_its_own_length() -> None:
    # Log-ratios (1/2, -1/5) and (-1/4, .5/2): gaps .75 and -.45.  IPO with β = .5 wants 1: .0625 and 2.1025.
    assert [each.tolist() for each in per_token(log_ratios(POLICY, REFERENCE), LENGTHS)] == [[0.5, -0.2], [-0.25, 0.25]]
    assert losses(loss=ipo, beta=0.5, length_normalized=True) == pytest.approx([0.0625, 2.1025], rel=1e-14)
    # Sigmoid with β = 2: log(1 + e^-1.5) = .2014133, log(1 + e^.9) = 1.2411539.
    assert losses(beta=2.0, length_normalized=True) == pytest.approx([0.2014132779, 1.2411538747], abs=1e-9)


def test_smoothed_labels_weigh_the_loss_of_the_pair_the_other_way_round() -> None:
    # .9 log(1 + e^-.5) + .1 log(1 + e^.5) = .4740770 + .1 · .5, for log(1 + e^x) - log(1 + e^-x) = x.
    assert losses(beta=0.25, label_smoothing=0.1)[0] == pytest.approx(0.4740769842 + 0.05, abs=1e-9)
    # Hinge, β = 1: gap 2: .8 · 0 + .2 · 3;  gap -1.5: .8 · 2.5 + .2 · 0 (1 - 1.5 is below 0).
    assert losses(loss=hinge, beta=1.0, label_smoothing=0.2) == pytest.approx([0.6, 2.0], rel=1e-14)


def test_unbiased_smoothing_gives_the_loss_of_right_labels_on_average() -> None:
    # Labels wrong with probability ε = .2 show the loss of h with .8 and of -h with .2.
    gaps = values(2.0, -1.5)
    shown = [unbiased(sigmoid, sign * gaps, beta=0.25, label_smoothing=0.2) for sign in (1, -1)]
    expected = 0.8 * shown[0] + 0.2 * shown[1]
    torch.testing.assert_close(expected, sigmoid(gaps, beta=0.25), rtol=1e-14, atol=0)
    assert losses(beta=0.25, label_smoothing=0.2, unbiased_smoothing=True) == shown[0].tolist()


@pytest.mark.parametrize("loss", [sigmoid, ipo])
def test_smoothed_labels_put_the_least_loss_where_the_noise_says(loss: object) -> None:
    # sigmoid: σ(β h) = 1 - ε, so h = log((1 - ε)/ε)/β; ipo: (1 - 2ε)/(2β).  ε = .2, β = .5: 2 log 4 and .6.
    best = 2 * math.log(4) if loss is sigmoid else 0.6
    around = values(best - 1e-3, best, best + 1e-3)
    low, least, high = smoothed(loss, around, beta=0.5, label_smoothing=0.2).tolist()
    assert least < low
    assert least < high
    assert low == pytest.approx(high, abs=1e-9)


def test_the_chosen_answer_s_own_likelihood_is_added_per_token() -> None:
    # -log π per token of the chosen answers: 4/2 = 2 and 10/5 = 2, a tenth of each.
    plain = losses(beta=0.25)
    assert losses(beta=0.25, nll_weight=0.1) == pytest.approx([plain[0] + 0.2, plain[1] + 0.2], rel=1e-14)
    assert losses(beta=0.25, nll_weight=1.0) == pytest.approx([plain[0] + 2, plain[1] + 2], rel=1e-14)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"beta": 0.0}], ids=str)
def test_an_objective_that_prefers_nothing_is_none(options: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        PairObjective(**options)


@pytest.mark.parametrize("length_normalized", [False, True])
def test_implicit_rewards_are_sums_as_trl_logs_them_and_pairs_are_ranked_as_the_loss_compares(
    length_normalized: bool,
) -> None:
    objective = PairObjective(beta=0.5, length_normalized=length_normalized)
    seen = MeasuredPairs.of(objective, POLICY, REFERENCE, LENGTHS)
    rewards = [seen.columns[f"rewards/{answer}"].tolist() for answer in ("chosen", "rejected")]
    assert rewards == [[0.5, -0.5], [-0.5, 0.25]]
    assert seen.columns["rewards/margins"].tolist() == [1.0, -0.75]
    margins = [0.375, -0.225] if length_normalized else [1.0, -0.75]  # of .25 - -.125 and -.1 - .125
    assert seen.columns["pairs/margin"].tolist() == pytest.approx(margins)


def test_a_tie_counts_half_in_our_accuracy_and_nothing_in_trls() -> None:
    same = OfPairs(values(-3.0, -5.0), values(-2.0, -5.0))
    means = MeasuredPairs.of(PairObjective(), same, same, OfPairs(values(2, 2), values(2, 2))).means()
    assert (means["pairs/accuracy"], means["rewards/accuracies"]) == (0.5, 0.0)


def test_a_pair_is_ranked_right_wrong_or_half() -> None:
    assert ranked_right(OfPairs(values(1, -1, 0.5), values(-1, 1, 0.5))).tolist() == [1, 0, 0.5]


def test_a_policy_that_is_its_reference_has_log_two_and_half_of_the_slope() -> None:
    gaps = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loss = sigmoid(gaps, beta=0.3)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-14)
    assert gaps.grad.item() == pytest.approx(-0.15, rel=1e-14)  # -β (1 - σ(0))


def test_a_gap_of_thousands_of_nats_has_a_finite_loss_and_slope() -> None:
    gaps = values(-5000, 5000).requires_grad_()
    loss = sigmoid(gaps, beta=1.0)
    loss.sum().backward()
    assert loss.tolist() == [5000, 0]
    assert gaps.grad.tolist() == [-1, 0]


def test_every_loss_has_a_name() -> None:
    assert {"sigmoid": sigmoid, "ipo": ipo, "hinge": hinge, "robust": sigmoid} == PREFERENCE_LOSSES


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
