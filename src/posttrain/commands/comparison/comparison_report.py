"""The results of a comparison, with intervals over seeds: comparison.json, the table as Markdown, and one picture."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.errors import RunError
from posttrain.runs.files import save_figure, write_atomically
from posttrain.runs.reports import LEFT_OUT, REWARD, SCORE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONFIDENCE = 0.95
NOTES = (
    "Before and after: accuracy on held-out problems at temperature 1, or the mean of a reward that counts"
    " something: a mean over seeds with Student's 95% interval.  `beyond the first` is the difference to the first"
    " variant with the same seed.  KL is from the trained policy to its start, on held-out prompts.  `training s` does"
    " not include evaluations.  The curves begin and end with a full evaluation; those between use fewer problems and"
    " one sample each, so they vary more."
)
Curve = Sequence[tuple[int, float, float]]
"""(tokens sampled so far, seconds of training so far, held-out accuracy) at each measurement."""
GRID = 60
"""Number of points at which the curves of seeds are averaged."""
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#222222"),  # Okabe and Ito, 2008
    *("#56b4e9", "#e69f00", "#999933", "#882255", "#888888"),  # and Tol's muted ones
)
"""Ten colours for readers with any colour vision; the second five are also dashed."""
FEW_VARIANTS = 5
"""Up to this many variants, single seeds are drawn too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """The content of a cell's cell.json."""

    variant: str
    seed: int
    recipe_digest: str
    before: Mapping[str, Any]
    """Held-out results, as in summary.json."""
    after: Mapping[str, Any]
    steps: int
    sampled_tokens: int
    seconds: float
    """Seconds of the whole run, evaluations included."""
    training_seconds: float
    """Without evaluations."""
    peak_memory_bytes: int
    kl: Mapping[str, float]
    """KL(π‖π₀) on held-out prompts; see `cells.drift_of`."""
    curve: Curve
    device: str
    versions: Mapping[str, str]

    def accuracy(self, results: Mapping[str, Any]) -> float:
        """The accuracy of results before or after training; or their mean reward, if it counts something."""
        names = ("accuracy_sampled",) if quantity([self]) == "accuracy" else (SCORE, REWARD)
        value = next((results[name] for name in names if results.get(name) is not None), None)
        if value is None:
            rule = "held-out accuracy was not measured: no problem is held out, or their completions were not scored"
            raise RunError(f"{self.variant} seed {self.seed}: {rule}.  See `before` and `after` in its summary.json.")
        return float(value)

    @property
    def accuracy_after(self) -> float:
        return self.accuracy(self.after)


def quantity(runs: Sequence[CellResult]) -> str:
    """The measure of runs: `accuracy`, or `reward` if their reward counts something."""
    return "reward" if any(LEFT_OUT in each for run in runs for each in (run.before, run.after)) else "accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its 95% interval; both ends are None for a single number."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """One row of the table."""

    variant: str
    seeds: tuple[int, ...]
    before: Estimate
    """Held-out accuracy at temperature 1 before training."""
    after: Estimate
    gain_over_first: Estimate | None
    """Accuracy minus the first variant's with the same seed; None for the first variant itself."""
    greedy: float | None
    pass_at_8: float | None
    mean_length: float
    kl_per_completion: float
    """KL(π‖π₀) on held-out prompts, in nats."""
    kl_per_token: float
    steps: float
    sampled_tokens: float
    training_seconds: float
    seconds: float
    peak_memory_bytes: int


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean, with Student's t interval over seeds; without an interval for a single value or equal values.

        x̄ ± t_{n-1, .975} s / √n

    Seeds differ in prompts and samples of training, not in the held-out problems: the interval covers what another
    seed may reach on the same problems.
    """
    mean = fmean(values)
    if len({*values}) < 2:
        return Estimate(mean=mean)
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def student_quantile(degrees: int) -> float:
    """The t within which Student's variable lies with a chance of `CONFIDENCE`: 12.7 for 1 degree, 4.30 for 2.

        P(|T| <= t) at θ = atan(t / √n), Abramowitz & Stegun 1964, 26.7.3 and 26.7.4:
        n even: sin θ (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + ... up to cos^(n-2) θ)
        n odd:  2/π (θ + sin θ (cos θ + 2/3 cos³θ + 2·4/(3·5) cos⁵θ + ... up to cos^(n-2) θ))

    Solved for θ by halving, to the last bits: a table of seeds needs no library for it.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle, degrees) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def share_within(angle: float, degrees: int) -> float:
    """P(|T| <= √n tan θ) of Student's variable with n degrees of freedom."""
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


def variant_results(results: Sequence[CellResult]) -> list[VariantResult]:
    """A row for every variant, in order of first appearance, compared with the first variant seed by seed."""
    by_variant: dict[str, dict[int, CellResult]] = {}
    for result in results:
        by_variant.setdefault(result.variant, {})[result.seed] = result
    rows: list[VariantResult] = []
    for name, cells in by_variant.items():
        runs, first = list(cells.values()), by_variant[rows[0].variant] if rows else {}
        gains = [cells[seed].accuracy_after - first[seed].accuracy_after for seed in sorted({*cells} & {*first})]
        rows.append(
            VariantResult(
                variant=name,
                seeds=tuple(sorted(cells)),
                before=mean_over_seeds([run.accuracy(run.before) for run in runs]),
                after=mean_over_seeds([run.accuracy_after for run in runs]),
                gain_over_first=mean_over_seeds(gains) if gains else None,
                greedy=mean_or_none([run.after["accuracy_greedy"] for run in runs]),
                pass_at_8=mean_or_none([run.after["pass_at_8"] for run in runs]),
                mean_length=fmean(run.after["mean_length"] for run in runs),
                kl_per_completion=fmean(run.kl["per_completion"] for run in runs),
                kl_per_token=fmean(run.kl["per_token"] for run in runs),
                steps=fmean(run.steps for run in runs),
                sampled_tokens=fmean(run.sampled_tokens for run in runs),
                training_seconds=fmean(run.training_seconds for run in runs),
                seconds=fmean(run.seconds for run in runs),
                peak_memory_bytes=max(run.peak_memory_bytes for run in runs),
            )
        )
    return rows


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """The mean, or None if some run did not measure it."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) and known else None


def write_comparison(folder: Path, results: Sequence[CellResult], budget: str) -> str:
    """Write all three files for the finished cells; returns the table."""
    rows = variant_results(results)
    table = markdown_table(rows)
    content = {"budget": budget, "variants": [*map(asdict, rows)], "cells": [*map(asdict, results)]}
    write_atomically(folder / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    write_atomically(folder / "comparison.md", f"Budget of a run: {budget}.\n\n{table}\n\n{NOTES}\n".encode())
    draw_comparison(results, folder / "comparison.png", budget)
    return table


def markdown_table(rows: Sequence[VariantResult]) -> str:
    lines = [[*COLUMNS], ["---", *["---:"] * (len(COLUMNS) - 1)]]
    lines += [[cell(row) for cell in COLUMNS.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


COLUMNS: dict[str, Callable[[VariantResult], str]] = {
    "variant": lambda row: row.variant,
    "seeds": lambda row: ", ".join(map(str, row.seeds)),
    "before": lambda row: f"{row.before.mean:.3f}",
    "after": lambda row: str(row.after),
    "beyond the first": lambda row: str(row.gain_over_first or ""),
    "greedy": lambda row: "" if row.greedy is None else f"{row.greedy:.3f}",
    "pass@8": lambda row: "" if row.pass_at_8 is None else f"{row.pass_at_8:.3f}",
    "length": lambda row: f"{row.mean_length:.0f}",
    "KL nats/completion": lambda row: f"{row.kl_per_completion:.2f}",
    "KL nats/token": lambda row: f"{row.kl_per_token:.4f}",
    "steps": lambda row: f"{row.steps:.0f}",
    "tokens": lambda row: f"{row.sampled_tokens:,.0f}",
    "training s": lambda row: f"{row.training_seconds:.0f}",
    "all s": lambda row: f"{row.seconds:.0f}",
    "memory GB": lambda row: f"{row.peak_memory_bytes / 1e9:.2f}",
}


def draw_comparison(results: Sequence[CellResult], picture: Path, budget: str) -> None:
    """Held-out accuracy against tokens sampled, against seconds of training, and at the end with its interval.

    The curves are means over seeds; with few variants, each seed also has a pale line.
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
    """The curves against tokens or seconds: `place` is the index of that quantity in a curve's points."""
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
    """Accuracy after training, one line per variant: every seed pale, their mean with its interval."""
    rows = variant_results(results)
    for number, row in enumerate(rows):
        colour = style(number)["color"]
        single = [result.accuracy_after for result in results if result.variant == row.variant]
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
