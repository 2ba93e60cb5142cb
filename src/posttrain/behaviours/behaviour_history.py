"""Behaviours over a finished run, read from its rollouts/, as a table and a picture.

Every completion of a step is read, including those that dynamic sampling replaced.  The table also has the mean reward
of completions with and without a behaviour.  That is a correlation, not an effect: long completions differ from short
ones in more than words.  Matplotlib is loaded only when a picture is drawn.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from posttrain.behaviours.behaviour_reader import BehaviourReader
from posttrain.behaviours.search_signs import Signs
from posttrain.errors import UserError
from posttrain.runs.curves import PALETTE, dress, running_mean
from posttrain.runs.files import save_figure
from posttrain.runs.intervals import share_interval
from posttrain.runs.run_folder import rollout_step


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """One completion of a step and its signs."""

    prompt: tuple[int, int]
    """Step and draw: completions of one prompt are not independent samples."""
    num_tokens: int
    reward: float | None
    signs: dict[str, Signs]


@dataclass(frozen=True, slots=True)
class BehaviourHistory:
    """Every completion of a run, step by step."""

    steps: dict[int, list[ReadCompletion]] = field(default_factory=dict)

    def shares(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the share of completions that show a behaviour in each."""
        shown = {
            step: [each.signs[name].shown for each in having_reading(rows, name)] for step, rows in self.steps.items()
        }
        return [step for step, each in shown.items() if each], [fmean(each) for each in shown.values() if each]

    def seen(self, name: str) -> bool:
        """Whether any completion shows a behaviour."""
        return any(each.signs[name].shown for rows in self.steps.values() for each in having_reading(rows, name))

    def signs(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the signs per 1000 completion tokens in each."""
        steps = [step for step, rows in self.steps.items() if having_reading(rows, name)]
        return steps, [per_1000_tokens(self.steps[step], name) for step in steps]

    def quarter(self, *, last: bool) -> list[ReadCompletion]:
        """The completions of the first or the last quarter of the steps."""
        steps = sorted(self.steps)
        some = max(1, len(steps) // 4)
        return [each for step in (steps[-some:] if last else steps[:some]) for each in self.steps[step]]


def having_reading(rows: Sequence[ReadCompletion], name: str) -> list[ReadCompletion]:
    """The completions that have a reading of this behaviour."""
    return [each for each in rows if name in each.signs]


def per_1000_tokens(rows: Sequence[ReadCompletion], name: str) -> float:
    """Signs of a behaviour per 1000 tokens of the completions that have a reading of it; at least one must."""
    read = having_reading(rows, name)
    return 1000 * sum(each.signs[name].count for each in read) / sum(each.num_tokens for each in read)


def read_history(run: Path, reader: BehaviourReader) -> BehaviourHistory:
    """The rollouts of a run's folder.  Raises UserError if it has none."""
    files = {step: file for file in sorted(run.glob("rollouts/*.parquet")) if (step := rollout_step(file)) is not None}
    if not files:
        raise UserError(
            f"{run}: has no rollouts/step-N.parquet.  Name the folder of a run of `posttrain rl` that took"
            " at least one step."
        )
    return BehaviourHistory({step: [*read_step(step, file, reader)] for step, file in sorted(files.items())})


def read_step(step: int, file: Path, reader: BehaviourReader) -> Iterator[ReadCompletion]:
    """The completions of one step."""
    import pyarrow.parquet as pq

    columns = ["draw", "completion", "tokens", "reward", "columns"]
    for row in pq.read_table(file, columns=columns).to_pylist():
        signs = reader.read(row["completion"], json.loads(row["columns"]))
        yield ReadCompletion((step, row["draw"]), len(row["tokens"]), row["reward"], signs)


def share_with_interval(rows: Sequence[ReadCompletion], name: str) -> tuple[float, float, float] | None:
    """Share of completions that show a behaviour, with its 95% interval over prompts; None without a reading."""
    by_prompt: dict[tuple[int, int], list[bool]] = {}
    for each in having_reading(rows, name):
        by_prompt.setdefault(each.prompt, []).append(each.signs[name].shown)
    if not by_prompt:
        return None
    means = np.array([fmean(shown) for shown in by_prompt.values()])
    return (float(means.mean()), *share_interval(means))


def reward_by_behaviour(rows: Sequence[ReadCompletion], name: str, *, shown: bool) -> float | None:
    """Mean reward of the completions that show a behaviour (or do not); None if there are none."""
    rewards = [
        each.reward
        for each in having_reading(rows, name)
        if each.reward is not None and each.signs[name].shown == shown
    ]
    return fmean(rewards) if rewards else None


def history_table(history: BehaviourHistory, reader: BehaviourReader) -> str:
    """A Markdown table: each behaviour in the first and the last quarter of the steps, with the mean rewards.

    Behaviours that no completion shows are listed below it.
    """
    first, last = history.quarter(last=False), history.quarter(last=True)
    lines = [
        "| behaviour | what | first quarter | last quarter | signs per 1000 tokens | reward with, at last | without |",
        "|---|---|---|---|---|---|---|",
    ]
    read = {name for name in reader.rows if any(having_reading(rows, name) for rows in history.steps.values())}
    unseen = [name for name in reader.rows if name in read and not history.seen(name)]
    for name, row in reader.rows.items():
        if name in unseen:
            continue
        before, after = share_with_interval(first, name), share_with_interval(last, name)
        if before is None or after is None:
            lines.append(f"| `{name}` | {row.says} | not read: problems without numbers and target | | | | |")
            continue
        signs = " → ".join(f"{per_1000_tokens(rows, name):.2f}" for rows in (first, last))
        rewards = [reward_by_behaviour(last, name, shown=shown) for shown in (True, False)]
        lines.append(
            f"| `{name}` | {row.says} | {share_text(before)} | {share_text(after)} | {signs}"
            f" | {' | '.join('—' if each is None else f'{each:.3f}' for each in rewards)} |"
        )
    footer = [f"\nNot seen in any completion: {', '.join(f'`{name}`' for name in unseen)}."] if unseen else []
    return "\n".join([*lines, *footer])


def share_text(numbers: tuple[float, float, float]) -> str:
    """A share with its interval."""
    share, low, high = numbers
    return f"{share:.3f} [{low:.3f}, {high:.3f}]"


def draw_behaviours(history: BehaviourHistory, reader: BehaviourReader, picture: Path, title: str = "") -> None:
    """Two panels for each kind of row: the share of completions that show it, and signs per 1000 tokens."""
    from matplotlib.figure import Figure

    seen = {name: row for name, row in reader.rows.items() if history.seen(name)} or reader.rows
    kinds = list(dict.fromkeys(row.kind for row in seen.values()))
    figure = Figure(figsize=(14, 4.5 * len(kinds)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    for (shares, signs), kind in zip(panels, kinds, strict=True):
        names = [name for name, row in seen.items() if row.kind == kind]
        draw_lines(shares, names, [history.shares(name) for name in names])
        draw_lines(signs, names, [history.signs(name) for name in names])
        shares.set_ylim(-0.02, 1.02)
        signs.set_ylim(bottom=0)
        dress(shares, f"Completions that show it: {kind}", "share of completions", legend="below")
        dress(signs, f"Signs: {kind}", "per 1000 completion tokens", legend="below")
    save_figure(figure, picture, dpi=110)


def draw_lines(axes: object, names: Sequence[str], curves: Sequence[tuple[list[int], list[float]]]) -> None:
    """One line per behaviour: its value at each step, and the running mean."""
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for index, (name, (steps, values)) in enumerate(zip(names, curves, strict=True)):
        colour = PALETTE[index % len(PALETTE)]
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, running_mean(values), color=colour, linewidth=2, label=name.replace("_", " "))
