"""What a comparison leaves: comparison.json, the table as Markdown, and one picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posttrain.runs.curves import PALETTE
from posttrain.runs.files import write_atomically
from posttrain.training.comparison.cell_runs import CellResult
from posttrain.training.comparison.statistics import VariantResult, accuracy, variant_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADS = ("variant", "seeds", "before", "after", "beyond the first", "greedy", "pass@8", "length", "KL nats/completion")
COSTS = ("KL nats/token", "steps", "tokens", "training s", "all s", "memory GB")
NOTES = (
    "Accuracy is that of held-out problems at temperature 1, a mean over seeds with Student's 95% interval over them;"
    " `beyond the first` is the difference to the first variant with the same seed.  KL is that of the trained policy"
    " to the one that it started from, on held-out prompts.  `training s` leaves evaluations out.  In the picture"
    " curves begin with a full evaluation and go on with those in brief, of fewer problems and one sample each, so that"
    " they jump about more; the dot at the end is the full one after training."
)
Curve = Sequence[tuple[int, float, float]]
"""(tokens sampled, seconds of training, held-out accuracy) along a run."""
GRID = 60
"""Points on which the curves of seeds are averaged."""


def write_comparison(folder: Path, results: Sequence[CellResult], budget: str) -> str:
    """Write all three for the cells that are finished; returns the table."""
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
    """The table, a row for each variant."""
    heads = [*HEADS, *COSTS]
    lines = [f"| {' | '.join(heads)} |", f"| --- | {' | '.join('---:' for _ in heads[1:])} |"]
    return "\n".join([*lines, *(f"| {' | '.join(cells_of(row))} |" for row in rows)])


def cells_of(row: VariantResult) -> list[str]:
    """The cells of one row, in the order of the heads."""
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

    In the curves every seed is thin and their mean thick; the mean after training is a dot of its own.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 5.5), layout="constrained")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    figure.suptitle(f"Held-out accuracy; budget of a run: {budget}", fontsize=13, fontweight="bold")
    draw_curves_of_variants(panels[0], results, 0)
    draw_curves_of_variants(panels[1], results, 1)
    draw_ends_of_variants(panels[2], results)
    labels = ("completion tokens sampled", "seconds of training", "share solved after training, 95% over seeds")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel(label, fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share solved, temperature 1", fontsize=10)
    panels[0].legend(fontsize=8, frameon=True, framealpha=0.8, edgecolor="none")
    figure.savefig(picture, dpi=110)


def draw_curves_of_variants(axes: "Axes", results: Sequence[CellResult], place: int) -> None:
    """The curves against one of what they cost: `place` is its place in a point of a curve."""
    for number, variant in enumerate(dict.fromkeys(result.variant for result in results)):
        colour = PALETTE[number % len(PALETTE)]
        whole = [result.curve for result in results if result.variant == variant and result.curve]
        curves = [along_the_way(curve) for curve in whole]
        for curve in curves:
            axes.plot(
                [point[place] for point in curve], [point[2] for point in curve], color=colour, alpha=0.25, lw=0.9
            )
        if curves:
            axes.plot(*mean_curve(curves, place), color=colour, linewidth=2.2, label=variant)
            ends = [(curve[-1][place], curve[-1][2]) for curve in whole]
            axes.plot(*np.mean(ends, axis=0), "o", color=colour, markersize=6)


def along_the_way(curve: Curve) -> Curve:
    """The points before training ended: the last one is a full evaluation, and those before it but the first in brief.

    Without evaluations along the way the line goes from the first to the last.
    """
    return curve[:-1] if len(curve) > 2 else curve


def draw_ends_of_variants(axes: "Axes", results: Sequence[CellResult]) -> None:
    """Accuracy after training, a line for each variant: every seed pale, their mean with its interval."""
    rows = variant_results(results)
    for number, row in enumerate(rows):
        colour = PALETTE[number % len(PALETTE)]
        single = [accuracy(result) for result in results if result.variant == row.variant]
        axes.plot(single, [number] * len(single), ".", color=colour, alpha=0.4)
        axes.plot([row.after.mean], [number], "o", color=colour)
        if row.after.low is not None and row.after.high is not None:
            axes.plot([row.after.low, row.after.high], [number, number], color=colour, linewidth=1.6)
    axes.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=9)
    axes.invert_yaxis()


def mean_curve(curves: Sequence[Curve], place: int) -> tuple[list[float], list[float]]:
    """The mean of curves, drawn straight from point to point, as far as all of them go."""
    end = min(curve[-1][place] for curve in curves)
    at = np.linspace(0.0, end, GRID)
    lines = [np.interp(at, [point[place] for point in curve], [point[2] for point in curve]) for curve in curves]
    return at.tolist(), np.mean(lines, axis=0).tolist()
