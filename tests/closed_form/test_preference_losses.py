"""Losses of pairs and of reward models by hand.  The two pairs of most tests have gaps h of 2 and -1.5 nats."""

import math

import numpy as np
import pytest
import torch

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
from tests.support.sequences import doubles

POLICY = OfPairs(doubles(-4, -10), doubles(-7, -6))
REFERENCE = OfPairs(doubles(-5, -9), doubles(-6, -6.5))
LENGTHS = OfPairs(doubles(2, 5), doubles(4, 2))
GAPS = doubles(2, -1.5)  # (1 - -1) and (-1 - .5)
# β h = .5 and -.375: log(1 + e^-.5) = log 1.6065307, log(1 + e^.375) = log 2.4549914.
SIGMOID = [0.4740769842, 0.8981232641]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.25}, SIGMOID),
        ({"loss": hinge, "beta": 0.25}, [0.5, 1.375]),  # 1 - .5, 1 + .375
        ({"loss": hinge, "beta": 1.0}, [0, 2.5]),  # the first gap of 2 is beyond 1
        # IPO wants a gap of 1/(2β): 2, so (2 - 2)² and (-1.5 - 2)²; then 5.
        ({"loss": ipo, "beta": 0.25}, [0, 12.25]),
        ({"loss": ipo, "beta": 0.1}, [9, 42.25]),
        # Per token, log-ratios are (1/2, -1/5) and (-1/4, .5/2): gaps .75 and -.45; IPO with β = .5 wants 1.
        ({"loss": ipo, "beta": 0.5, "length_normalized": True}, [0.0625, 2.1025]),
        # log(1 + e^-1.5), log(1 + e^.9)
        ({"beta": 2.0, "length_normalized": True}, [0.2014132779, 1.2411538747]),
        # .9 log(1 + e^-.5) + .1 log(1 + e^.5), for log(1 + e^x) - log(1 + e^-x) = x.
        ({"beta": 0.25, "label_smoothing": 0.1}, [SIGMOID[0] + 0.1 * 0.5, SIGMOID[1] - 0.1 * 0.375]),
        # Hinge, gap 2: .8 · 0 + .2 · 3;  gap -1.5: .8 · 2.5 + .2 · 0 (1 - 1.5 is below 0).
        ({"loss": hinge, "beta": 1.0, "label_smoothing": 0.2}, [0.6, 2.0]),
        # -log π per token of the chosen answers: 4/2 and 10/5.
        ({"beta": 0.25, "nll_weight": 0.1}, [SIGMOID[0] + 0.2, SIGMOID[1] + 0.2]),
        ({"beta": 0.25, "nll_weight": 1.0}, [SIGMOID[0] + 2, SIGMOID[1] + 2]),
    ],
)
def test_the_loss_of_two_pairs(options: dict[str, object], expected: list[float]) -> None:
    assert PairObjective(**options).losses(POLICY, REFERENCE, LENGTHS).tolist() == pytest.approx(expected, abs=1e-9)


def test_log_ratios_are_of_each_answer_and_means_divide_each_by_its_own_length() -> None:
    ratios = log_ratios(POLICY, REFERENCE)
    assert [each.tolist() for each in ratios] == [[1, -1], [-1, 0.5]]
    assert [each.tolist() for each in per_token(ratios, LENGTHS)] == [[0.5, -0.2], [-0.25, 0.25]]


def test_unbiased_smoothing_gives_the_loss_of_right_labels_on_average() -> None:
    # Labels wrong with probability ε = .2 show the loss of h with .8 and of -h with .2.
    shown = [unbiased(sigmoid, sign * GAPS, beta=0.25, label_smoothing=0.2) for sign in (1, -1)]
    torch.testing.assert_close(0.8 * shown[0] + 0.2 * shown[1], sigmoid(GAPS, beta=0.25), rtol=1e-14, atol=0)
    objective = PairObjective(beta=0.25, label_smoothing=0.2, unbiased_smoothing=True)
    assert objective.losses(POLICY, REFERENCE, LENGTHS).tolist() == shown[0].tolist()


# sigmoid: σ(β h) = 1 - ε, so h = log((1 - ε)/ε)/β; ipo: (1 - 2ε)/(2β).  ε = .2, β = .5.
@pytest.mark.parametrize(("loss", "best"), [(sigmoid, 2 * math.log(4)), (ipo, 0.6)])
def test_smoothed_labels_put_the_least_loss_where_the_noise_says(loss: object, best: float) -> None:
    low, least, high = smoothed(loss, doubles(best - 1e-3, best, best + 1e-3), beta=0.5, label_smoothing=0.2).tolist()
    assert least < min(low, high)
    assert low == pytest.approx(high, abs=1e-9)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"beta": 0.0}], ids=str)
def test_an_objective_that_prefers_nothing_is_none(options: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        PairObjective(**options)


# Of .25 - -.125 and -.1 - .125 per token.
@pytest.mark.parametrize(("length_normalized", "margins"), [(False, [1.0, -0.75]), (True, [0.375, -0.225])])
def test_implicit_rewards_are_sums_as_trl_logs_them_and_pairs_are_ranked_as_the_loss_compares(
    length_normalized: bool, margins: list[float]
) -> None:
    objective = PairObjective(beta=0.5, length_normalized=length_normalized)
    seen = MeasuredPairs.of(objective, POLICY, REFERENCE, LENGTHS)
    rewards = [seen.columns[f"rewards/{side}"].tolist() for side in ("chosen", "rejected")]
    assert rewards == [[0.5, -0.5], [-0.5, 0.25]]
    assert seen.columns["rewards/margins"].tolist() == [1.0, -0.75]
    assert seen.columns["pairs/margin"].tolist() == pytest.approx(margins)


def test_a_tie_counts_half_in_our_accuracy_and_nothing_in_trls() -> None:
    same = OfPairs(doubles(-3.0, -5.0), doubles(-2.0, -5.0))
    means = MeasuredPairs.of(PairObjective(), same, same, OfPairs(doubles(2, 2), doubles(2, 2))).means()
    assert (means["pairs/accuracy"], means["rewards/accuracies"]) == (0.5, 0.0)
    assert ranked_right(OfPairs(doubles(1, -1, 0.5), doubles(-1, 1, 0.5))).tolist() == [1, 0, 0.5]


@pytest.mark.parametrize(
    ("beta", "gaps", "losses", "slopes"),
    [
        (0.3, [0.0], [math.log(2)], [-0.15]),  # a policy that is its reference: -β (1 - σ(0))
        (1.0, [-5000.0, 5000.0], [5000, 0], [-1, 0]),
    ],
)
def test_the_slope_of_the_sigmoid_loss_is_finite_whatever_the_gap(beta, gaps, losses, slopes) -> None:
    at = doubles(*gaps).requires_grad_()
    loss = sigmoid(at, beta=beta)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx(losses, rel=1e-14)
    assert at.grad.tolist() == pytest.approx(slopes, rel=1e-14)


def test_every_loss_has_a_name() -> None:
    assert {"sigmoid": sigmoid, "ipo": ipo, "hinge": hinge, "robust": sigmoid} == PREFERENCE_LOSSES


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
def test_the_bradley_terry_loss_of_a_pair(chosen: float, rejected: float, margin: float, expected: float) -> None:
    for shift in (0.0, 8.0):  # only the difference counts
        found = bradley_terry(doubles(chosen + shift), doubles(rejected + shift), doubles(margin))
        assert found.item() == pytest.approx(expected, abs=1e-12)


def test_centring_charges_for_the_sum_and_not_for_the_difference() -> None:
    # (1 + 2)² = 9, (3 - 3)² = 0, (-1 - 1)² = 4
    assert centring(doubles(1, 3, -1), doubles(2, -3, -1)).tolist() == [9, 0, 4]


def test_slopes_of_bradley_terry_are_those_of_finite_differences_and_of_the_formula() -> None:
    chosen, rejected, margins = doubles(0.3, -1.2, 4.0), doubles(0.5, -2.0, 1.0), doubles(0.0, 1.5, 0.2)
    at = chosen.clone().requires_grad_()
    bradley_terry(at, rejected, margins).sum().backward()
    for row, nudge in enumerate(1e-6 * torch.eye(3, dtype=torch.float64)):
        up, down = (bradley_terry(chosen + sign * nudge, rejected, margins).sum() for sign in (1, -1))
        assert at.grad[row].item() == pytest.approx(((up - down) / 2e-6).item(), rel=1e-7)
    # dL/dr_c = -σ(m - (r_c - r_r)), written here as -1/(1 + e^(r_c - r_r - m))
    assert at.grad.tolist() == pytest.approx((-1 / (1 + torch.exp(chosen - rejected - margins))).tolist(), rel=1e-12)


def test_bradley_terry_is_the_likelihood_that_inverse_rl_fits_to_preferences() -> None:
    # There a path's score is θ·φ; with two features the scores of three pairs are θ·Δφ apart.
    theta, differences = np.array([0.7, -0.4]), np.array([[1.0, 2.0], [-3.0, 0.5], [0.0, 1.0]])
    objective = BradleyTerry(differences, temperature=1.0, share=1 / 3)
    found = bradley_terry(torch.from_numpy(differences @ theta), doubles(0, 0, 0), doubles(0, 0, 0))
    assert found.mean().item() == pytest.approx(objective.value(theta), rel=1e-12)
