"""How right a reward model is on held-out pairs, and whether its probabilities mean what they say: by hand."""

import math

import numpy as np
import pytest
import torch

from posttrain.records import Preference, Prompt
from posttrain.training.pairs.prompt_bootstrap import mean_intervals
from posttrain.training.reward_model.calibration import HeldOutPairs, held_out_pairs
from posttrain.training.reward_model.pair_scores import PairScores


def measured(margins: list[float], *, prompts: list[int] | None = None, num_bins: int = 10) -> HeldOutPairs:
    numbers = torch.tensor(margins, dtype=torch.float64)
    places = prompts or [*range(len(margins))]
    pairs = [
        Preference(
            prompt=Prompt(id=str(each), text="", tokens=(each,)), chosen=(1,), rejected=(2,), where=f"rows:{row}"
        )
        for row, each in enumerate(places)
    ]
    return held_out_pairs(PairScores(numbers / 2, -numbers / 2), pairs, num_bins)


def test_an_interval_is_over_prompts_however_many_pairs_each_has() -> None:
    """Every pair twice is no more evidence; the same pairs taken for those of other prompts would seem to be."""
    values = np.array([[0.0, 3.0], [1.0, 5.0], [4.0, 1.0], [2.0, 2.0], [7.0, 0.0]])
    (low, high), second = mean_intervals([*"abcde"], values)
    assert mean_intervals([*"aabbccddee"], values.repeat(2, axis=0)) == [
        pytest.approx((low, high)),
        pytest.approx(second),
    ]
    narrow, _ = mean_intervals([*"abcdefghij"], values.repeat(2, axis=0))
    assert low < narrow[0] < values[:, 0].mean() < narrow[1] < high


def test_accuracy_counts_a_tie_as_half_and_the_loss_is_that_of_the_probabilities() -> None:
    found = measured([math.log(3), math.log(3), -math.log(3), 0.0])
    assert found.accuracy == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert found.loss == pytest.approx((2 * math.log(4 / 3) + math.log(4) + math.log(2)) / 4)
    assert found.margin == pytest.approx(math.log(3) / 4)
    assert found.mean_reward == pytest.approx(0)


def test_the_mean_and_deviation_are_those_of_all_scores() -> None:
    pairs = [Preference(prompt=Prompt(id="p", text="", tokens=(1,)), chosen=(1,), rejected=(2,), where="rows:1")] * 2
    scores = PairScores(torch.tensor([3.0, 1.0]).double(), torch.tensor([1.0, -1.0]).double())
    found = held_out_pairs(scores, pairs, 10)
    assert (found.mean_reward, found.reward_std) == (1.0, pytest.approx(math.sqrt(2)))
    assert scores.metrics() == {
        "accuracy": 1.0,
        "margin": 2.0,
        "mean_reward": 1.0,
        "min_reward": -1.0,
        "max_reward": 3.0,
    }


def test_a_model_that_says_three_quarters_and_is_right_three_times_of_four_is_calibrated() -> None:
    found = measured([math.log(3)] * 3 + [-math.log(3)])
    assert found.calibration_error == pytest.approx(0, abs=1e-12)
    (only,) = found.bins
    assert (only.low, only.high, only.num_pairs) == (0.75, 0.8, 4)
    assert (only.confidence, only.right) == (pytest.approx(0.75), 0.75)
    # Wilson: (3/4 + 1.96²/8 ± 1.96 √(3/64 + 1.96²/64)) / (1 + 1.96²/4)
    assert only.right_interval == pytest.approx((0.3006, 0.9544), abs=1e-4)


def test_the_error_is_the_mean_over_pairs_of_the_gap_of_their_bin() -> None:
    # Bins of a quarter: 4 pairs at .75 of which 1 is right: gap .5; 2 ties at 1/2, half right: gap 0.  4/6 · 1/2 = 1/3.
    found = measured([math.log(3), *[-math.log(3)] * 3, 0.0, 0.0], num_bins=2)
    assert found.calibration_error == pytest.approx(4 / 6 * 0.5)
    assert [each.num_pairs for each in found.bins] == [2, 4]


def test_a_certain_model_is_in_the_last_bin_and_wrong_by_what_it_is_wrong() -> None:
    found = measured([100.0, 100.0, 100.0, -100.0])
    (last,) = found.bins
    assert (last.low, last.high, last.right) == (0.95, 1.0, 0.75)
    assert found.calibration_error == pytest.approx(0.25)


def test_intervals_hold_the_value_and_are_drawn_over_prompts() -> None:
    margins = [1.0, -1.0] * 50
    apart = measured(margins)
    together = measured(margins, prompts=[place // 2 for place in range(100)])  # one right, one wrong
    low, high = apart.accuracy_interval
    # A share of a half of 100: ±1.96 · √(.25/100) = ±.098
    assert low == pytest.approx(0.402, abs=0.02)
    assert high == pytest.approx(0.598, abs=0.02)
    assert together.accuracy_interval == (0.5, 0.5)
    for name in ("loss", "margin", "accuracy", "calibration_error"):
        low, high = getattr(apart, f"{name}_interval")
        assert low <= getattr(apart, name) <= high or name == "calibration_error"
    assert measured(margins).accuracy_interval == apart.accuracy_interval  # and the same each time


def test_what_is_written_is_plain_numbers() -> None:
    found = measured([1.0, -0.5, 2.0])
    assert all(type(value) is float for value in found.metrics().values())
    summary = found.summary()
    assert summary["num_pairs"] == 3
    for name in ("loss", "accuracy", "margin", "calibration_error"):
        value, interval = getattr(found, name), getattr(found, f"{name}_interval")
        assert (summary[name], summary[f"{name}_interval"]) == (value, [*interval])
        told = [found.metrics()[f"eval/{name}{end}"] for end in ("", "_low", "_high")]
        assert told == [value, *interval]
    assert not any(isinstance(value, np.generic) for each in found.bins for value in each.as_json().values())
