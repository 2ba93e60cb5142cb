"""The results of a comparison: comparison.json, the table as Markdown, and one picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.commands.comparison.statistics import CellResult, VariantResult, accuracy, quantity, variant_results
from posttrain.runs.files import save_figure, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADS = ("variant", "seeds", "before", "after", "beyond the first", "greedy", "pass@8", "length", "KL nats/completion")
COSTS = ("KL nats/token", "steps", "tokens", "training s", "all s", "memory GB")
NOTES = (
    "Before and after are the accuracy on held-out problems at temperature 1, or the mean of a reward that counts"
    " something: a mean over seeds with Student's 95% interval.  `beyond the first` is the difference to the first"
    " variant with the same seed.  KL is from the trained policy to its start, on held-out prompts.  `training s` does"
    " not include evaluations.  The curves begin and end with a full evaluation; those between use fewer problems and"
    " one sample each, so they vary more."
)
Curve = Sequence[tuple[int, float, float]]
"""(tokens sampled, seconds of training, held-out accuracy) along a run."""
GRID = 60
"""Points on which the curves of seeds are averaged."""
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#222222"),  # Okabe and Ito, 2008
    *("#56b4e9", "#e69f00", "#999933", "#882255", "#888888"),  # and Tol's muted ones
)
"""Ten that readers with any colour vision can tell apart; the second five are also dashed."""
FEW_VARIANTS = 5
"""Up to here single seeds are drawn too."""


def write_comparison(folder: Path, results: Sequence[CellResult], budget: str) -> str:
    """Write all three for the finished cells; returns the table."""
    rows = variant_results(results)
    table = markdown_table(rows)
    content = {
        "budget": budget,
        "variants": [asdict(row) for row in rows],
        "cells": [asdict(result) for result in results],
    }
    write_atomically(folder / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / "comparison.md", f"Budget of a run: {budget}.\n\n{table}\n\n{NOTES}\n".encode())
    draw_comparison(results, folder / "comparison.png", budget)
    return table


def markdown_table(rows: Sequence[VariantResult]) -> str:
    heads = [*HEADS, *COSTS]
    lines = [f"| {' | '.join(heads)} |", f"| --- | {' | '.join('---:' for _ in heads[1:])} |"]
    return "\n".join([*lines, *(f"| {' | '.join(cells_of(row))} |" for row in rows)])


def cells_of(row: VariantResult) -> list[str]:
    return [
        row.variant,
        ", ".join(map(str, row.seeds)),
        f"{row.before.mean:.3f}",
        str(row.after),
        "" if row.gain_over_first is None else str(row.gain_over_first),
        "" if row.greedy is None else f"{row.greedy:.3f}",
        "" if row.pass_at_8 is None else f"{row.pass_at_8:.3f}",
        f"{row.mean_length:.0f}",
        f"{row.kl_per_completion:.2f}",
        f"{row.kl_per_token:.4f}",
        f"{row.steps:.0f}",
        f"{row.sampled_tokens:,.0f}",
        f"{row.training_seconds:.0f}",
        f"{row.seconds:.0f}",
        f"{row.peak_memory_bytes / 1e9:.2f}",
    ]


def draw_comparison(results: Sequence[CellResult], picture: Path, budget: str) -> None:
    """Held-out accuracy against tokens sampled, against seconds of training, and at the end with its interval.

    The curves are means over seeds; a few variants have a pale line for each seed as well.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(18, 6.4), layout="constrained")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    figure.suptitle(f"Held-out {quantity(results)}; budget of a run: {budget}", fontsize=14, fontweight="bold")
    draw_curves_of_variants(panels[0], results, 0)
    draw_curves_of_variants(panels[1], results, 1)
    draw_ends_of_variants(panels[2], results)
    solved = "share solved" if quantity(results) == "accuracy" else "mean reward"
    labels = ("completion tokens sampled", "seconds of training", f"{solved} after training, 95% over seeds")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label, fontsize=12)
        axes.tick_params(labelsize=11)
        axes.grid(alpha=0.25, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"{solved}, temperature 1", fontsize=12)
    panels[0].xaxis.set_major_locator(MaxNLocator(5))
    panels[0].xaxis.set_major_formatter("{x:,.0f}")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=12, frameon=False, loc="outside lower center", ncols=min(6, len(names) or 1))
    save_figure(figure, picture, dpi=110)


def style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": ("-", "--", ":", "-.")[number // FEW_VARIANTS % 4]}


def draw_curves_of_variants(axes: "Axes", results: Sequence[CellResult], place: int) -> None:
    """The curves against tokens or seconds: `place` is its place in a point of a curve."""
    variants = list(dict.fromkeys(result.variant for result in results))
    for number, variant in enumerate(variants):
        curves = [result.curve for result in results if result.variant == variant and result.curve]
        for curve in curves if len(variants) <= FEW_VARIANTS else []:
            points = [point[place] for point in curve], [point[2] for point in curve]
            axes.plot(*points, **style(number) | {"alpha": 0.25, "linewidth": 0.9})
        if curves:
            end = mean_curve(curves, place)
            axes.plot(*end, **style(number), linewidth=2.2, label=variant)
            axes.plot(end[0][-1], end[1][-1], "o", color=style(number)["color"], markersize=5)


def draw_ends_of_variants(axes: "Axes", results: Sequence[CellResult]) -> None:
    """Accuracy after training, a line for each variant: every seed pale, their mean with its interval."""
    rows = variant_results(results)
    for number, row in enumerate(rows):
        colour = style(number)["color"]
        single = [accuracy(result) for result in results if result.variant == row.variant]
        axes.plot(single, [number] * len(single), "|", color=colour, alpha=0.7, markersize=11)
        axes.plot([row.after.mean], [number], "o", color=colour, markersize=7)
        if row.after.low is not None and row.after.high is not None:
            axes.plot([row.after.low, row.after.high], [number, number], **style(number), linewidth=1.6)
    axes.set_yticks(range(len(rows)), [row.variant for row in rows])
    axes.invert_yaxis()


def mean_curve(curves: Sequence[Curve], place: int) -> tuple[list[float], list[float]]:
    """The mean of curves at equal shares of their length, linear between points, up to their mean end."""
    shares = np.linspace(0.0, 1.0, GRID)
    lines = [
        np.interp(shares * curve[-1][place], [point[place] for point in curve], [point[2] for point in curve])
        for curve in curves
    ]
    end = float(np.mean([curve[-1][place] for curve in curves]))
    return (shares * end).tolist(), np.mean(lines, axis=0).tolist()
