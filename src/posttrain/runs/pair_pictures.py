"""Pictures of a run on pairs: its curves, and how far predicted probabilities are those that are observed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.runs.curves import BLUE, GREEN, GREY, ORANGE, Records, draw_loss, dress, running_mean, series
from posttrain.runs.files import read_metrics, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_pair_curves(metrics: Path, picture: Path, title: str = "") -> None:
    """Draw loss, accuracy, margin and calibration error of a reward model against the step."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    draw_loss(panels[0, 0], records)
    panels[0, 0].set_ylabel("nats per pair", fontsize=9)
    draw_measure(panels[0, 1], records, "accuracy", "Pairs in the right order", "share of pairs")
    panels[0, 1].axhline(0.5, color=GREY, linewidth=1, linestyle="--")
    panels[0, 1].set_ylim(0, 1)
    draw_measure(panels[1, 0], records, "margin", "Margin", "chosen less rejected")
    by_chance = series(records, "eval/calibration_error_by_chance")
    panels[1, 1].plot(*by_chance, color=GREY, linewidth=1, linestyle="--", label="a calibrated model, by chance")
    draw_measure(panels[1, 1], records, "calibration_error", "Calibration error", "probability")
    panels[1, 1].set_ylim(bottom=0)
    save_figure(figure, picture, dpi=110)


def draw_measure(axes: "Axes", records: Records, name: str, title: str, unit: str) -> None:
    """A measure of each step, its running mean, and that of held-out pairs with its interval."""
    steps, values = series(records, name)
    if steps:
        axes.plot(steps, values, color=BLUE, alpha=0.35, linewidth=1, marker=".", markersize=3, label="step")
        axes.plot(steps, running_mean(values), color=BLUE, linewidth=2.2, label="mean of neighbours")
    measured, held_out = series(records, f"eval/{name}")
    if measured:
        axes.plot(measured, held_out, color=GREEN, linewidth=2, marker="o", markersize=4, label="held out")
        low, high = (series(records, f"eval/{name}_{end}")[1] for end in ("low", "high"))
        if len(low) == len(high) == len(measured):
            axes.fill_between(measured, low, high, color=GREEN, alpha=0.18, linewidth=0, label="95% interval")
    dress(axes, title, unit)


def calibration_words(measured: Mapping[str, Any]) -> str:
    """The calibration error beside that of a calibrated model, which runs of an earlier version did not measure."""
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
