"""Curves of a run from its metrics lines: panels, stacked outcomes and stacked seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.viewer.answer_types import Curves, Line, Number, Outcomes, Stack
from posttrain.viewer.folder_files import number

Records = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A metric in a panel."""

    metric: str
    label: str
    axis: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel, drawn if a run has one of its metrics.  Of `instead` metrics only the first that exists is drawn."""

    name: str
    unit: str
    drawn: tuple[Drawn, ...]
    scale: Literal["linear", "share"] = "linear"
    instead: bool = False
    hides_zero: bool = False
    """Whether it is left out while all its numbers are 0."""


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
        (Drawn("kl", "to the reference"), Drawn("kl_teacher", "to the teacher"), Drawn("kl_behaviour", "to μ")),
    ),
    Panel(
        "Entropy",
        "nats per token",
        (Drawn("entropy", "of the policy"), Drawn("entropy_estimate", "estimated from samples")),
        instead=True,
    ),
    Panel("Gradient norm", "before clipping", (Drawn("grad_norm", "gradient norm"),)),
    Panel("Clipped", "share of tokens", (Drawn("clip_ratio/low_mean", "low"), Drawn("clip_ratio/high_mean", "high"))),
    Panel("Explained variance", "of returns", (Drawn("value/explained_variance", "critic"),)),
    Panel("Groups without a signal", "share of groups", (Drawn("frac_uninformative_groups", "no signal"),), "share"),
    Panel("Gap to the demonstrations", "of feature expectations", (Drawn("gap", "gap"),)),
    Panel("Largest step", "of a reward", (Drawn("largest_step", "largest step"),)),
    Panel("Objective", "nats", (Drawn("objective", "objective"),)),
    Panel("Largest gradient", "of the objective", (Drawn("largest_gradient", "largest gradient"),)),
    Panel("Turns", "per completion", (Drawn("turns/mean", "mean"), Drawn("tools/call_frequency", "tool calls"))),
)
"""In order.  Those of rewards are left out where there is no reward, and `Loss` where there is one."""
BY_REWARD = ("Reward", "Loss")


def panels(records: Records) -> list[Curves]:
    """The panels for which there are numbers."""
    by_reward = any("reward" in record for record in records)
    left_out = BY_REWARD[1] if by_reward else BY_REWARD[0]
    found: list[Curves] = []
    for panel in PANELS:
        lines = [line for each in panel.drawn if (line := line_of(records, each)) is not None]
        says = lines and (not panel.hides_zero or any(value for line in lines for value in line["values"]))
        if says and panel.name != left_out:
            shown = lines[:1] if panel.instead else lines
            found.append(Curves(panel=panel.name, unit=panel.unit, scale=panel.scale, lines=shown))
    return found


def line_of(records: Records, drawn: Drawn) -> Line | None:
    """A metric by step, with its interval; a later line of a step replaces an earlier one."""
    values = series(records, drawn.metric)
    if not values:
        return None
    ends = [series(records, f"{drawn.metric}_{end}") for end in ("low", "high")]
    low, high = ([end.get(step) for step in values] if end else [] for end in ends)
    return Line(name=drawn.label, steps=[*values], values=[*values.values()], low=low, high=high, axis=drawn.axis)


def series(records: Records, name: str) -> dict[int, Number]:
    return {step: number(record[name]) for record in records if name in record for step in [int(str(record["step"]))]}


def names_with(records: Records, prefix: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record if name.startswith(prefix)))


def outcomes(records: Records) -> Outcomes:
    """Shares of the outcomes of the function with the most of them; a missing one is 0."""
    names = names_with(records, "outcomes/")
    functions = [name.split("/")[1] for name in names]
    function = max(sorted(set(functions)), key=functions.count, default="")
    shown = [name for name in names if name.startswith(f"outcomes/{function}/")]
    return Outcomes(function=function, **stack(records, shown))


def seconds_by_stage(records: Records) -> Stack:
    return stack([record for record in records if "step_time" in record], names_with(records, "seconds/"))


def stack(records: Records, names: Sequence[str]) -> Stack:
    told = [record for record in records if any(name in record for name in names)]
    return Stack(
        steps=[int(str(record["step"])) for record in told],
        names=[name.rpartition("/")[2] for name in names],
        values=[[number(record.get(name, 0.0)) for record in told] for name in names],
    )
