"""Curves of a run from its metrics lines: panels, stacked outcomes and stacked seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.viewer.metric_lines import MetricLines, Series, Values, plain_values
from posttrain.viewer.response_types import Curves, Line, Number, Outcomes, Stack

MOST_POINTS = 1000
"""Of a line."""
ROUNDING = 1e-9
"""Of a mean over tokens."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A metric in a panel."""

    metric: str
    label: str
    axis: Literal["left", "right"] = "left"
    moves: bool = False
    """Left out if all such lines of its panel are 0 up to rounding, as with one update per step, where π is μ."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel, drawn if a run has one of its metrics.  Of its `instead` metrics, only the first existing one counts."""

    name: str
    unit: str
    drawn: tuple[Drawn, ...]
    scale: Literal["linear", "share"] = "linear"
    instead: bool = False


PANELS = (
    Panel("Reward", "mean reward", (Drawn("reward", "training"), Drawn("eval/reward", "held out"))),
    Panel(
        "Held-out accuracy",
        "share solved",
        (
            Drawn("eval/accuracy_sampled", "sampled"),
            Drawn("eval/accuracy_greedy", "greedy"),
            Drawn("eval/pass_at_8", "pass@8"),
        ),
        "share",
    ),
    Panel("Held-out score", "mean score", (Drawn("eval/score", "sampled"),)),
    Panel("Loss", "nats", (Drawn("loss", "training"), Drawn("eval/loss", "held out"))),
    Panel(
        "Likeliest token",
        "share of tokens",
        (Drawn("mean_token_accuracy", "training"), Drawn("eval/mean_token_accuracy", "held out")),
        "share",
    ),
    Panel(
        "Pairs ranked right",
        "share of pairs",
        (
            Drawn("pairs/accuracy", "training"),
            Drawn("eval/pairs/accuracy", "held out"),
            Drawn("eval/accuracy", "held out"),
        ),
        "share",
    ),
    Panel("Margin of pairs", "score", (Drawn("pairs/margin", "training"), Drawn("eval/pairs/margin", "held out"))),
    Panel(
        "Implicit reward", "β log π/π_ref", (Drawn("rewards/chosen", "chosen"), Drawn("rewards/rejected", "rejected"))
    ),
    Panel(
        "Length",
        "tokens",
        (
            Drawn("completions/mean_length", "mean"),
            Drawn("completions/mean_terminated_length", "of those that ended"),
            Drawn("completions/clipped_ratio", "share cut off", "right"),
        ),
    ),
    Panel(
        "KL",
        "nats per token",
        (
            Drawn("kl", "to the reference"),
            Drawn("kl_teacher", "to the teacher"),
            Drawn("kl_behaviour", "to μ", moves=True),
        ),
    ),
    Panel(
        "Entropy",
        "nats per token",
        (Drawn("entropy", "of the policy"), Drawn("entropy_estimate", "estimated from samples")),
        instead=True,
    ),
    Panel("Gradient norm", "before clipping", (Drawn("grad_norm", "gradient norm"),)),
    Panel(
        "Clipped", "share of tokens", tuple(Drawn(f"clip_ratio/{end}_mean", end, moves=True) for end in ("low", "high"))
    ),
    Panel("Explained variance", "of returns", (Drawn("value/explained_variance", "critic"),)),
    Panel("Groups without a signal", "share of groups", (Drawn("frac_uninformative_groups", "no signal"),), "share"),
    Panel("Gap to the demonstrations", "of feature expectations", (Drawn("gap", "gap"),)),
    Panel("Largest step", "of a reward", (Drawn("largest_step", "largest step"),)),
    Panel("Objective", "nats", (Drawn("objective", "objective"),)),
    Panel("Largest gradient", "of the objective", (Drawn("largest_gradient", "largest gradient"),)),
    Panel("Turns", "per completion", (Drawn("turns/mean", "mean"), Drawn("tools/call_frequency", "tool calls"))),
)
"""Panels in order.  Without rewards, reward panels are left out; with rewards, `Loss` is left out."""
BY_REWARD = ("Reward", "Loss")


def curve_panels(metrics: MetricLines) -> list[Curves]:
    """The panels for which there are numbers."""
    left_out = BY_REWARD[1] if "reward" in metrics.names else BY_REWARD[0]
    found: list[Curves] = []
    for panel in PANELS:
        still = all(is_zero(metrics, each) for each in panel.drawn if each.moves)
        drawn = [each for each in panel.drawn if not (each.moves and still)]
        lines = [line for each in drawn if (line := line_of(metrics, each)) is not None]
        if lines and panel.name != left_out:
            shown = lines[:1] if panel.instead else lines
            found.append(Curves(panel=panel.name, unit=panel.unit, scale=panel.scale, lines=shown))
    return found


def is_zero(metrics: MetricLines, drawn: Drawn) -> bool:
    return not (np.abs(metrics.series(drawn.metric).values) > ROUNDING).any()


def line_of(metrics: MetricLines, drawn: Drawn) -> Line | None:
    """A metric by step, with its interval."""
    found = metrics.series(drawn.metric)
    if not len(found.steps):
        return None
    places = extremes(found.values)
    steps, values = found.steps[places], plain_values(found.values[places])
    low, high = (at_steps(metrics.series(f"{drawn.metric}_{end}"), steps) for end in ("low", "high"))
    return Line(name=drawn.label, steps=steps.tolist(), values=values, low=low, high=high, axis=drawn.axis)


def at_steps(series: Series, steps: Values) -> list[Number]:
    """A metric at some steps, null where it has none; empty if it has none at all."""
    if not len(series.steps):
        return []
    at = np.minimum(np.searchsorted(series.steps, steps), len(series.steps) - 1)
    return plain_values(np.where(series.steps[at] == steps, series.values[at], np.nan))


def extremes(values: Values) -> Values:
    """The places that are drawn: all, or of each stretch of many the lowest and the highest, and both ends."""
    count = len(values)
    if count <= MOST_POINTS:
        return np.arange(count)
    size = -(-count // (MOST_POINTS // 2))
    stretches = -(-count // size)
    padded = np.full(stretches * size, np.nan)
    padded[:count] = values
    known = padded.reshape(stretches, size)
    missing, starts = np.isnan(known), size * np.arange(stretches)
    lowest = np.where(missing, np.inf, known).argmin(axis=1) + starts
    highest = np.where(missing, -np.inf, known).argmax(axis=1) + starts
    return np.unique(np.concatenate([[0, count - 1], lowest, highest]))


def names_with(metrics: MetricLines, prefix: str) -> list[str]:
    return [name for name in metrics.names if name.startswith(prefix)]


def outcomes(metrics: MetricLines) -> Outcomes:
    """Shares of the outcomes of the function with the most of them; a missing one is 0."""
    names = names_with(metrics, "outcomes/")
    functions = [name.split("/")[1] for name in names]
    function = max(sorted(set(functions)), key=functions.count, default="")
    shown = [name for name in names if name.startswith(f"outcomes/{function}/")]
    return Outcomes(function=function, **metric_stack(metrics, shown))


def seconds_by_stage(metrics: MetricLines) -> Stack:
    return metric_stack(metrics, names_with(metrics, "seconds/"), within="step_time")


def metric_stack(metrics: MetricLines, names: Sequence[str], *, within: str = "") -> Stack:
    """Some metrics at the lines with one of them, and only those with `within`; of many lines every n-th."""
    found = [metrics.lines_with(name) for name in names]
    lines = np.unique(np.concatenate([np.zeros(0, dtype=int), *(each for each, _ in found)]))
    if within:
        lines = np.intersect1d(lines, metrics.lines_with(within)[0])
    apart = -(-len(lines) // MOST_POINTS) or 1
    lines = lines[(len(lines) - 1) % apart :: apart]
    values = []
    for own, numbers in found:
        column = np.zeros(len(lines))
        _, at, place = np.intersect1d(lines, own, assume_unique=True, return_indices=True)
        column[at] = numbers[place]
        values.append(plain_values(column))
    steps = np.array(metrics.steps, dtype=int)[lines].tolist()
    return Stack(steps=steps, names=[name.rpartition("/")[2] for name in names], values=values)
