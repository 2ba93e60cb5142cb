"""Pictures of a run on pairs: its curves, and how far predicted probabilities are those that are observed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.runs.curves import GREEN, GREY, ORANGE, draw_measure, dress, series
from posttrain.runs.files import read_metrics, save_figure


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
    draw_measure(panels[1, 0], records, "margin", "Margin", "chosen less rejected")
    by_chance = series(records, "eval/calibration_error_by_chance")
    panels[1, 1].plot(*by_chance, color=GREY, linewidth=1, linestyle="--", label="a calibrated model, by chance")
    draw_measure(panels[1, 1], records, "calibration_error", "Calibration error", "probability")
    panels[1, 1].set_ylim(bottom=0)
    save_figure(figure, picture, dpi=110)


def calibration_words(measured: Mapping[str, Any]) -> str:
    words, chance = f"calibration error {measured['calibration_error']:.3f}", "calibration_error_by_chance"
    return f"{words} ({measured[chance]:.3f} by chance for a calibrated model)" if chance in measured else words


def draw_calibration(measured: Mapping[str, Any], picture: Path, title: str = "") -> None:
    """Draw, for bins of predicted probability, the share of pairs that turned out so, over how many there are."""
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
