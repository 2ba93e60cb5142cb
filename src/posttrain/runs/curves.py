"""curves.png: a run at a glance, drawn from metrics.jsonl.  Matplotlib is only loaded when a picture is drawn."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.runs.files import read_metrics, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Records = Sequence[Mapping[str, object]]

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db3", "#e0862b", "#3a9a68", "#c8473f", "#8463ac", "#8a8f98"
PALETTE = (GREEN, BLUE, ORANGE, PURPLE, RED, "#4fb0c6", "#b98b5b", GREY, "#d47ba3", "#9aa83a")
SMOOTHING = 0.2
"""How fast the weight of a step falls with distance, in the mean of noisy curves."""


def draw_curves(metrics: Path, picture: Path, title: str = "") -> None:
    """Draw reward, held-out accuracy, length, outcomes, stability and time against the step."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    figure = Figure(figsize=(15, 8), layout="constrained")
    panels = figure.subplots(2, 3)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    by_reward = any("reward" in record for record in records)
    of_pairs = not by_reward and any("pairs/margin" in record for record in records)
    if by_reward:
        draw_measure(panels[0, 0], records, "reward", "Reward", "mean reward")
        draw_held_out(panels[0, 1], records)
    else:
        draw_measure(panels[0, 0], records, "loss", "Loss", "of a pair" if of_pairs else "nats per token")
        panels[0, 1].set_ylim(0, 1)
    if of_pairs:
        draw_measure(panels[0, 1], records, "pairs/accuracy", "Pairs ranked right", "share of pairs")
        draw_both_answers(panels[0, 2], records, "rewards", "Implicit reward", "β log π/π_ref")
        draw_both_answers(panels[1, 0], records, "logps", "log π", "nats per answer")
    else:
        if not by_reward:
            draw_measured(panels[0, 1], records, "mean_token_accuracy", "held out")
            dress(panels[0, 1], "Likeliest token", "share of tokens")
        draw_length(panels[0, 2], records)
        draw_outcomes(panels[1, 0], records)
    draw_stability(panels[1, 1], records)
    timed = [record for record in records if "step_time" in record]
    stack(panels[1, 2], timed, metric_names(timed, "seconds/"))
    panels[1, 2].set_ylim(bottom=0)
    dress(panels[1, 2], "Time per step", "seconds")
    save_figure(figure, picture, dpi=110)


def draw_measure(axes: "Axes", records: Records, name: str, title: str, unit: str) -> None:
    steps, values = series(records, name)
    if steps:
        axes.plot(steps, values, color=BLUE, alpha=0.35, linewidth=1, marker=".", markersize=3, label="step")
        axes.plot(steps, running_mean(values), color=BLUE, linewidth=2.2, label="mean of neighbours")
    draw_measured(axes, records, name, "held out")
    dress(axes, title, unit)


def draw_measured(
    axes: "Axes", records: Records, name: str, label: str, colour: str = GREEN, *, interval: bool = True
) -> None:
    """A result of the evaluations, with its interval if they have one."""
    steps, values = series(records, f"eval/{name}")
    if steps:
        axes.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    low_steps, low = series(records, f"eval/{name}_low")
    high = series(records, f"eval/{name}_high")[1]
    if interval and low and len(low) == len(high):
        axes.fill_between(low_steps, low, high, color=colour, alpha=0.18, linewidth=0, label="95% interval")


def draw_held_out(axes: "Axes", records: Records) -> None:
    """Held-out accuracy, with the interval of sampled accuracy; else the mean score, or the reward."""
    kinds = (
        ("pass_at_8", "pass@8", GREY),
        ("accuracy_greedy", "greedy", ORANGE),
        ("accuracy_sampled", "sampled", GREEN),
    )
    if not any(f"eval/{name}" in record for record in records for name, *_ in kinds):
        name = "score" if any("eval/score" in record for record in records) else "reward"
        draw_measured(axes, records, name, "sampled")
        dress(axes, f"Held-out {name}", f"mean {name}")
        return
    for name, label, colour in kinds:
        draw_measured(axes, records, name, label, colour, interval=name == "accuracy_sampled")
    axes.set_ylim(0, 1)
    dress(axes, "Held-out accuracy", "share solved")


def draw_both_answers(axes: "Axes", records: Records, name: str, title: str, unit: str) -> None:
    """A metric of chosen and rejected answers, per step and held out."""
    for answer, colour in (("chosen", GREEN), ("rejected", RED)):
        steps, values = series(records, f"{name}/{answer}")
        axes.plot(steps, values, color=colour, linewidth=1.2, alpha=0.5, label=answer)
        measured, held_out = series(records, f"eval/{name}/{answer}")
        if measured:
            label = f"{answer}, held out"
            axes.plot(measured, held_out, color=colour, linewidth=2, marker="o", markersize=4, label=label)
    dress(axes, title, unit)


def draw_length(axes: "Axes", records: Records) -> None:
    """Completion lengths, and the share cut off by the limit."""
    steps, mean = series(records, "completions/mean_length")
    axes.plot(steps, mean, color=PURPLE, linewidth=2, label="mean length")
    ended_steps, ended = series(records, "completions/mean_terminated_length")
    axes.plot(ended_steps, ended, color=PURPLE, linewidth=1.2, linestyle="--", alpha=0.7, label="of those that ended")
    axes.set_ylim(bottom=0)
    cut_steps, cut = series(records, "completions/clipped_ratio")
    right = axes.twinx()
    right.plot(cut_steps, cut, color=RED, linewidth=1.2, alpha=0.8, label="cut off (right axis)")
    right.set_ylim(0, 1)
    right.set_ylabel("share cut off", fontsize=9, color=RED)
    right.tick_params(colors=RED, labelsize=8)
    right.spines[["top", "left"]].set_visible(False)
    axes.plot([], [], color=RED, linewidth=1.2, label="cut off (right axis)")
    dress(axes, "Completion length", "tokens")


def draw_outcomes(axes: "Axes", records: Records) -> None:
    """Outcomes of the reward function with the most outcomes, as shares that sum to 1."""
    names = metric_names(records, "outcomes/")
    functions = [name.split("/")[1] for name in names]
    function = max(sorted(set(functions)), key=functions.count, default="")
    shown = [name for name in names if name.startswith(f"outcomes/{function}/")]
    told = [record for record in records if any(name in record for name in shown)]
    stack(axes, told, shown)
    axes.set_ylim(0, 1)
    dress(axes, f"Outcomes: {function}" if function else "Outcomes", "share of completions")


def draw_stability(axes: "Axes", records: Records) -> None:
    """KL, entropy and gradient norm, on a logarithmic axis."""
    for choices, colour in (
        ({"kl": "KL to reference (nats/token)", "kl_behaviour": "KL to behaviour (nats/token)"}, RED),
        ({"entropy": "entropy (nats/token)", "entropy_estimate": "entropy, estimated (nats/token)"}, BLUE),
        ({"grad_norm": "gradient norm"}, GREY),
    ):
        for name, label in choices.items():
            steps, values = series(records, name)
            if any(value > 0 for value in values):
                positive = [value if value > 0 else nan for value in values]  # estimates of a KL can be negative
                axes.plot(steps, positive, color=colour, linewidth=1.6, label=label)
                break
    axes.set_yscale("log")
    dress(axes, "Stability", "logarithmic scale")


def stack(axes: "Axes", records: Records, names: Sequence[str]) -> None:
    """Stacked areas; a missing metric is 0."""
    if not records or not names:
        return
    steps = [plot_number(record["step"]) for record in records]
    # `step="mid"` draws a stage that runs in some steps only as a bar, not as a slope.
    layers = [[plot_number(record.get(name, 0.0)) for record in records] for name in names]
    if len(steps) == 1:  # an area needs two ends
        steps, layers = [steps[0], steps[0] + 1], [[layer[0], layer[0]] for layer in layers]
    labels = [name.rsplit("/", 1)[1].replace("_", " ") for name in names]
    axes.stackplot(steps, layers, labels=labels, colors=PALETTE, alpha=0.85, linewidth=0, step="mid")
    axes.margins(x=0)


def dress(axes: "Axes", title: str, unit: str, *, legend: Literal["inside", "below"] = "inside") -> None:
    """Title, labels, grid and legend (below the panel if it would cover many lines), or "no data"."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend == "below" and axes.lines:
        axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    elif axes.lines or axes.collections:
        axes.legend(fontsize=8, frameon=True, framealpha=0.8, edgecolor="none")
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=GREY)


def series(records: Records, name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric, if it exists; the full evaluation at the end replaces a brief one."""
    found = {record["step"]: record[name] for record in records if record.get(name) is not None}
    return [*map(plot_number, found)], [*map(plot_number, found.values())]


def plot_number(value: object) -> float:
    """A JSON number; null, for non-finite values, leaves a gap."""
    return float(value) if isinstance(value, int | float) else nan


def metric_names(records: Records, prefix: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record if name.startswith(prefix)))


def running_mean(values: Sequence[float]) -> list[float]:
    """The weighted mean of a step and its neighbours on both sides, without lag.

        m_t = Σ_s w^|t - s| x_s / Σ_s w^|t - s|        w = 1 - SMOOTHING

    Steps without a number are skipped.
    """
    sums = decayed_sums([0.0 if isnan(value) else value for value in values])
    weights = decayed_sums([float(not isnan(value)) for value in values])
    return [total / weight if weight else nan for total, weight in zip(sums, weights, strict=True)]


def decayed_sums(values: Sequence[float]) -> list[float]:
    """Σ_s w^|t - s| x_s, from the sums before and after each step."""
    before, behind = (
        list(accumulate(each, lambda total, value: (1 - SMOOTHING) * total + value)) for each in (values, values[::-1])
    )
    return [left + right - value for left, right, value in zip(before, behind[::-1], values, strict=True)]
