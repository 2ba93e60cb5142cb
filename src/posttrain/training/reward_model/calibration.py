"""Accuracy and calibration of a reward model on held-out pairs, and their pictures.

For each pair, a reward model predicts which answer is preferred, with confidence p = σ(|r_chosen - r_rejected|), from
1/2 to 1.  It is calibrated if it is right for a share p of the pairs with confidence p:

    ECE = Σ_b n_b/n |share right in b - mean confidence in b|       over bins b of confidence (Naeini et al. 2015)

A tie counts as half right, with confidence 1/2.

By chance, the share in a bin differs from its confidence, so ECE is above 0 even for a calibrated model, and a
bootstrap interval is too high.  ECE is therefore reported together with the ECE of a calibrated model on as many pairs.
The other measures have 95% bootstrap intervals over prompts, since pairs of one prompt are not independent.  Shares
near 0 or 1, or of few pairs, have Jeffreys' intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from posttrain.records import Preference
from posttrain.runs import intervals
from posttrain.runs.curves import GREEN, GREY, ORANGE, draw_measure, dress, series
from posttrain.runs.files import read_metrics, save_figure
from posttrain.training.pair_updates import PairScores

WITH_INTERVAL = ("loss", "accuracy", "margin")
CALIBRATION = ("calibration_error", "calibration_error_by_chance", "calibration_error_by_chance_high")
OF_SCORES = ("mean_reward", "reward_std")
ENDS = ("low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """Pairs of similar confidence."""

    low: float
    """Bounds of the confidence; the upper bound is only included if it is 1."""
    high: float
    num_pairs: int
    confidence: float
    """Mean predicted probability of the answer that scores higher."""
    right: float
    """Share of pairs where this answer was preferred."""
    right_interval: intervals.Interval

    def as_json(self) -> dict[str, object]:
        return {
            "confidence": [self.low, self.high],
            "num_pairs": self.num_pairs,
            "mean_confidence": self.confidence,
            "share_right": self.right,
            "share_right_interval": list(self.right_interval),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPairs:
    """A reward model on held-out pairs; each measure with its interval."""

    num_pairs: int
    loss: float
    """Mean -log σ(r_chosen - r_rejected), without margins and centring, in nats; log 2 = 0.693 for equal scores."""
    loss_interval: intervals.Interval
    accuracy: float
    """Share of pairs whose chosen answer scores higher."""
    accuracy_interval: intervals.Interval
    margin: float
    """Mean r_chosen - r_rejected."""
    margin_interval: intervals.Interval
    mean_reward: float
    reward_std: float
    """Population standard deviation of all scores."""
    calibration_error: float
    """ECE, 0 to 1/2.  Too large for few pairs: compare it with the next two."""
    calibration_error_by_chance: float
    """Mean ECE of a perfectly calibrated model with the same confidences on as many pairs."""
    calibration_error_by_chance_high: float
    """95% of such models have less."""
    bins: tuple[CalibrationBin, ...]
    """Non-empty bins, by rising confidence."""

    def metrics(self) -> dict[str, float]:
        found = {f"eval/{name}": getattr(self, name) for name in (*WITH_INTERVAL, *CALIBRATION, *OF_SCORES)}
        ends = {name: getattr(self, f"{name}_interval") for name in WITH_INTERVAL}
        return found | {f"eval/{name}_{end}": each[end == "high"] for name, each in ends.items() for end in ENDS}

    def summary(self) -> dict[str, object]:
        found = {name: getattr(self, name) for name in ("num_pairs", *WITH_INTERVAL, *CALIBRATION, *OF_SCORES)}
        ends = {f"{name}_interval": list(getattr(self, f"{name}_interval")) for name in WITH_INTERVAL}
        return {**found, **ends, "calibration": [each.as_json() for each in self.bins]}


def held_out_pairs(scores: PairScores, pairs: Sequence[Preference], num_bins: int) -> HeldOutPairs:
    """Measure the scores of one or more pairs."""
    margins, right = scores.margins.numpy(), scores.right.numpy()
    both = np.concatenate([scores.chosen.numpy(), scores.rejected.numpy()])
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    inside = bin_of(confidence, num_bins)[:, None] == np.arange(num_bins)  # [pair bin]
    parts = {
        "pairs": np.ones((len(pairs), 1)),
        "loss": np.logaddexp(0.0, -margins)[:, None],
        "accuracy": right[:, None],
        "margin": margins[:, None],
        "in_bin": inside.astype(float),
        "right_in_bin": right[:, None] * inside,
        "confidence_in_bin": confidence[:, None] * inside,
    }
    prompts = [pair.prompt.tokens for pair in pairs]
    columns = np.concatenate([*parts.values()], axis=1)
    ends = np.cumsum([part.shape[1] for part in parts.values()])[:-1]
    sums = Sums(dict(zip(parts, np.split(columns.sum(axis=0, keepdims=True), ends, axis=1), strict=True)))
    resampled = intervals.resampled_sums(prompts, columns)
    drawn = Sums(dict(zip(parts, np.split(resampled, ends, axis=1), strict=True)))
    by_chance = errors_by_chance(confidence, bin_of(confidence, num_bins))
    return HeldOutPairs(
        num_pairs=len(pairs),
        loss=float(sums.mean("loss")[0]),
        loss_interval=intervals.percentiles(drawn.mean("loss")),
        accuracy=float(right.mean()),
        accuracy_interval=intervals.share_of_pairs_interval(
            prompts, float(right.mean()), intervals.percentiles(drawn.mean("accuracy"))
        ),
        margin=float(sums.mean("margin")[0]),
        margin_interval=intervals.percentiles(drawn.mean("margin")),
        mean_reward=float(both.mean()),
        reward_std=float(both.std()),
        calibration_error=float(sums.calibration_error()[0]),
        calibration_error_by_chance=float(by_chance.mean()),
        calibration_error_by_chance_high=float(np.quantile(by_chance, 0.95)),
        bins=tuple(
            CalibrationBin(
                low=0.5 + 0.5 * which / num_bins,
                high=0.5 + 0.5 * (which + 1) / num_bins,
                num_pairs=round(count),
                confidence=float(sums.of["confidence_in_bin"][0, which]) / count,
                right=(share := float(sums.of["right_in_bin"][0, which]) / count),
                right_interval=intervals.jeffreys_interval(share, round(count)),
            )
            for which, count in enumerate(sums.of["in_bin"][0].tolist())
            if count
        ),
    )


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over all pairs, or over each resample, by what is summed."""

    of: Mapping[str, Float64[ndarray, "resample column"]]

    def mean(self, name: str) -> Float64[ndarray, " resample"]:
        found: ndarray = self.of[name][:, 0] / self.of["pairs"][:, 0]
        return found

    def calibration_error(self) -> Float64[ndarray, " resample"]:
        """ECE, with n_b |share right - confidence| as |Σ right - Σ confidence|."""
        gaps = np.abs(self.of["right_in_bin"] - self.of["confidence_in_bin"]).sum(axis=1)
        found: ndarray = gaps / self.of["pairs"][:, 0]
        return found


def errors_by_chance(
    confidence: Float64[ndarray, " pair"], bins: Int64[ndarray, " pair"]
) -> Float64[ndarray, " simulation"]:
    """ECE of simulated outcomes in which each pair is right with its confidence, a tie always half.

    The same confidences give the same numbers.
    """
    random, gaps = np.random.default_rng(0), np.empty(intervals.RESAMPLES)
    for number in range(intervals.RESAMPLES):  # one at a time, as pairs may be many
        right = np.where(confidence > 0.5, random.random(len(confidence)) < confidence, 0.5)
        gaps[number] = np.abs(np.bincount(bins, right - confidence)).sum()
    found: ndarray = gaps / len(confidence)
    return found


def bin_of(confidence: Float64[ndarray, " pair"], num_bins: int) -> Int64[ndarray, " pair"]:
    place: ndarray = np.minimum(((confidence - 0.5) * 2 * num_bins).astype(np.int64), num_bins - 1)
    return place


def draw_pair_curves(metrics: Path, picture: Path, title: str = "") -> None:
    """Draw loss, accuracy, margin and calibration error of a reward model against the step."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    draw_measure(panels[0, 0], records, "loss", "Loss", "nats per pair")
    draw_measure(panels[0, 1], records, "accuracy", "Pairs in the right order", "share of pairs")
    panels[0, 1].axhline(0.5, color=GREY, linewidth=1, linestyle="--")
    panels[0, 1].set_ylim(0, 1)
    draw_measure(panels[1, 0], records, "margin", "Margin", "chosen minus rejected")
    by_chance = series(records, "eval/calibration_error_by_chance")
    panels[1, 1].plot(*by_chance, color=GREY, linewidth=1, linestyle="--", label="a calibrated model, by chance")
    draw_measure(panels[1, 1], records, "calibration_error", "Calibration error", "probability")
    panels[1, 1].set_ylim(bottom=0)
    save_figure(figure, picture, dpi=110)


def calibration_words(measured: Mapping[str, Any]) -> str:
    words, chance = f"calibration error {measured['calibration_error']:.3f}", "calibration_error_by_chance"
    return f"{words} ({measured[chance]:.3f} by chance for a calibrated model)" if chance in measured else words


def draw_calibration(measured: Mapping[str, Any], picture: Path, title: str = "") -> None:
    """Draw the share of correct pairs for bins of predicted probability, over their numbers of pairs."""
    from matplotlib.figure import Figure

    bins: Sequence[Mapping[str, Any]] = measured["calibration"]
    figure = Figure(figsize=(6.5, 7.5), layout="constrained")
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    figure.suptitle(title, fontsize=14, fontweight="bold")
    curve.plot([0.5, 1], [0.5, 1], color=GREY, linewidth=1, linestyle="--", label="calibrated")
    predicted = [each["mean_confidence"] for each in bins]
    observed = [each["share_right"] for each in bins]
    below = [each["share_right"] - each["share_right_interval"][0] for each in bins]
    above = [each["share_right_interval"][1] - each["share_right"] for each in bins]
    look: dict[str, Any] = {"color": GREEN, "marker": "o", "markersize": 5, "capsize": 3, "linestyle": "none"}
    curve.errorbar(predicted, observed, yerr=[below, above], label="held-out pairs", **look)
    curve.set_ylim(0, 1.02)
    dress(curve, calibration_words(measured).capitalize(), "share right")
    left = [each["confidence"][0] for each in bins]
    width = [each["confidence"][1] - each["confidence"][0] for each in bins]
    counts.bar(left, [each["num_pairs"] for each in bins], width=width, align="edge", color=ORANGE, alpha=0.85)
    counts.set_ylabel("pairs", fontsize=9)
    counts.tick_params(labelsize=8)
    counts.spines[["top", "right"]].set_visible(False)
    counts.set_xlabel("predicted probability of the answer that scores higher", fontsize=9)
    curve.set_xlabel("")
    save_figure(figure, picture, dpi=110)
