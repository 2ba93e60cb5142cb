"""How right a reward model is on held-out pairs, and whether its probabilities mean what they say: by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta

from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.runs.intervals import mean_intervals
from posttrain.training.pair_updates import PairScores
from posttrain.training.reward_model.calibration import CALIBRATION, WITH_INTERVAL, HeldOutPairs, held_out_pairs
from tests.support.sequences import doubles

LN3 = math.log(3)
"""The margin of a pair whose chosen answer has the probability 3/4."""


def pairs_of(prompts: list[int]) -> list[Preference]:
    answers = {"chosen": TokenSequence.one_turn((1,)), "rejected": TokenSequence.one_turn((2,))}
    return [
        Preference(prompt=Prompt(id=str(each), text="", tokens=(each,)), where=f"rows:{row}", **answers)
        for row, each in enumerate(prompts)
    ]


def measured(margins: list[float], *, prompts: list[int] | None = None, num_bins: int = 10) -> HeldOutPairs:
    numbers = torch.tensor(margins, dtype=torch.float64)
    return held_out_pairs(PairScores(numbers / 2, -numbers / 2), pairs_of(prompts or [*range(len(margins))]), num_bins)


def test_an_interval_is_over_prompts_however_many_pairs_each_has() -> None:
    """Every pair twice is no more evidence; the same pairs taken for those of other prompts would seem to be."""
    values = np.array([[0.0, 3.0], [1.0, 5.0], [4.0, 1.0], [2.0, 2.0], [7.0, 0.0]])
    (low, high), second = mean_intervals([*"abcde"], values)
    twice = mean_intervals([*"aabbccddee"], values.repeat(2, axis=0))
    assert twice == [pytest.approx((low, high)), pytest.approx(second)]
    narrow, _ = mean_intervals([*"abcdefghij"], values.repeat(2, axis=0))
    assert low < narrow[0] < values[:, 0].mean() < narrow[1] < high


def test_accuracy_counts_a_tie_as_half_and_the_loss_is_that_of_the_probabilities() -> None:
    found = measured([LN3, LN3, -LN3, 0.0])
    assert found.accuracy == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert found.loss == pytest.approx((2 * math.log(4 / 3) + math.log(4) + math.log(2)) / 4)
    assert (found.margin, found.mean_reward) == pytest.approx((LN3 / 4, 0))


def test_the_mean_and_deviation_are_those_of_all_scores() -> None:
    scores = PairScores(doubles(3.0, 1.0), doubles(1.0, -1.0))
    found = held_out_pairs(scores, pairs_of([1, 1]), 10)
    assert (found.mean_reward, found.reward_std) == (1.0, pytest.approx(math.sqrt(2)))
    told = {"accuracy": 1.0, "margin": 2.0, "mean_reward": 1.0, "min_reward": -1.0, "max_reward": 3.0}
    assert scores.metrics() == told


@pytest.mark.parametrize(
    ("margins", "num_bins", "error", "pairs_in_bins"),
    [
        ([LN3] * 3 + [-LN3], 10, 0, [4]),  # says three quarters and is right three times of four
        # Bins of a quarter: 4 pairs at .75 of which 1 is right: gap .5; 2 ties at 1/2, half right: gap 0.
        ([LN3, *[-LN3] * 3, 0.0, 0.0], 2, 4 / 6 * 0.5, [2, 4]),
        ([100.0, 100.0, 100.0, -100.0], 10, 0.25, [4]),
        # Too sure and not sure enough do not make up for each other: 4 pairs at .75 of which 1 is right, gap -1/2; 5 at
        # .9, all right, gap 1/10.
        ([LN3, *[-LN3] * 3, *[math.log(9)] * 5], 10, (4 * 0.5 + 5 * 0.1) / 9, [4, 5]),
    ],
)
def test_the_error_is_the_mean_over_pairs_of_the_gap_of_their_bin(margins, num_bins, error, pairs_in_bins) -> None:
    found = measured(margins, num_bins=num_bins)
    assert found.calibration_error == pytest.approx(error, abs=1e-12)
    assert [each.num_pairs for each in found.bins] == pairs_in_bins


def test_a_bin_has_its_ends_its_confidence_and_how_many_were_right() -> None:
    (only,) = measured([LN3] * 3 + [-LN3]).bins
    assert (only.low, only.high, only.num_pairs) == (0.75, 0.8, 4)
    assert (only.confidence, only.right) == (pytest.approx(0.75), 0.75)
    assert only.right_interval == pytest.approx(beta.ppf([0.025, 0.975], 3.5, 1.5), abs=1e-4)  # Jeffreys' of 3 in 4
    (last,) = measured([100.0, 100.0, 100.0, -100.0]).bins
    assert (last.low, last.high, last.right) == (0.95, 1.0, 0.75)


def test_by_chance_a_calibrated_model_has_the_mean_deviation_of_a_binomial() -> None:
    # Four pairs at 3/4: Σ_k P(k) |k - 3| / 4 with P = (1, 12, 54, 108, 81)/256 is 162/1024 = .158.  The mean of 2,000
    # draws with deviation .11 is known to .0025.  |k - 3| = 2 and 3 have 13/256 = .0508 together: 95% are below .5.
    found = measured([LN3] * 4)
    assert found.calibration_error == pytest.approx(0.25), "all four are right"
    assert found.calibration_error_by_chance == pytest.approx(162 / 1024, abs=0.01)
    assert 0.25 <= found.calibration_error_by_chance_high <= 0.5
    assert measured([0.0] * 6).calibration_error_by_chance == 0, "ties are half right whatever happens"


def test_a_calibrated_model_stays_below_the_bound_in_19_of_20_cases() -> None:
    rng = np.random.default_rng(3)
    below = 0
    for _ in range(60):
        margins = rng.normal(0, 1.5, size=50)
        right = rng.random(50) < 1 / (1 + np.exp(-np.abs(margins)))
        found = measured([*np.where(right, np.abs(margins), -np.abs(margins))])
        below += found.calibration_error <= found.calibration_error_by_chance_high
    assert below >= 52, "Binomial(60, .95) has 57 ± 1.7"


def test_intervals_hold_the_value_and_are_drawn_over_prompts() -> None:
    margins = [1.0, -1.0] * 50
    apart, again = measured(margins), measured(margins)
    together = measured(margins, prompts=[place // 2 for place in range(100)])  # one right, one wrong
    # A share of a half of 100: ±1.96 · √(.25/100) = ±.098
    assert apart.accuracy_interval == pytest.approx((0.402, 0.598), abs=0.02)
    assert together.accuracy_interval == (0.5, 0.5)
    assert again.accuracy_interval == apart.accuracy_interval
    for name in WITH_INTERVAL:
        low, high = getattr(apart, f"{name}_interval")
        assert low <= getattr(apart, name) <= high
    # Where all pairs agree it is still no point; five pairs of one prompt are one draw.
    low, high = measured([1.0] * 5).accuracy_interval
    assert (low, high) == (pytest.approx(beta.ppf(0.025, 5.5, 0.5), abs=1e-4), 1.0)
    assert measured([1.0] * 5, prompts=[7] * 5).accuracy_interval[0] < low


def test_what_is_written_is_plain_numbers() -> None:
    found = measured([1.0, -0.5, 2.0])
    metrics, summary = found.metrics(), found.summary()
    assert {type(value) for value in metrics.values()} == {float}
    assert summary["num_pairs"] == 3
    for name in WITH_INTERVAL:
        value, interval = getattr(found, name), getattr(found, f"{name}_interval")
        assert (summary[name], summary[f"{name}_interval"]) == (value, [*interval])
        assert [metrics[f"eval/{name}{end}"] for end in ("", "_low", "_high")] == [value, *interval]
    for name in CALIBRATION:
        assert summary[name] == metrics[f"eval/{name}"] == getattr(found, name)
    assert not any(isinstance(value, np.generic) for each in found.bins for value in each.as_json().values())
