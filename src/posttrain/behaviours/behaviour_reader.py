"""Counts signs of behaviours in completions, per step and per evaluation.

Each row has two numbers: the share of completions that show it, and its signs per 1000 completion tokens.  Longer
completions show more of everything.  If the share rises and the signs per token do not, only the length has grown.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from posttrain.behaviours import behaviour_table
from posttrain.behaviours.sign_reader import SignReader, Tally, tallies
from posttrain.errors import UserError
from posttrain.records import Group
from posttrain.runs.curves import PALETTE, dress, running_mean
from posttrain.runs.files import save_figure
from posttrain.runs.intervals import share_interval
from posttrain.runs.run_folder import rollout_step
from posttrain.tasks.base import Probe, Reading

SHARE, SIGNS = "behaviour", "behaviour_signs"
"""Prefixes of metrics: `behaviour/<name>`, a share, and `behaviour_signs/<name>`, per 1000 tokens."""


@dataclass(frozen=True)
class BehaviourReader(SignReader):
    """Measures the chosen rows in groups of completions."""

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Share and signs per 1000 tokens of each row, over what was sampled: the prefill is the prompt's."""
        found = tallies(
            (self.read(each.text, group.prompt.columns), each.num_sampled)
            for group in groups
            for each in group.rollouts
        )
        return {f"{SHARE}/{name}": tally.share for name, tally in found.items()} | {
            f"{SIGNS}/{name}": tally.per_1000_tokens for name, tally in found.items()
        }

    def probes(self) -> Mapping[str, Probe]:
        """The same of held-out completions, in full evaluations; nothing if no row is chosen."""
        if not self.rows:
            return {}
        readings = {f"{SHARE}/{name}": Reading(row.says) for name, row in self.rows.items()}
        per_token = {
            f"{SIGNS}/{name}": Reading(f"{row.says}, signs per 1000 tokens", digits=2)
            for name, row in self.rows.items()
        }
        return {"behaviours": Probe(readings={**readings, **per_token}, measure=self.metrics)}


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """One completion of a step and its signs."""

    prompt: tuple[int, int]
    """Step and draw: completions of one prompt are not independent samples."""
    num_tokens: int
    reward: float | None
    signs: dict[str, behaviour_table.Signs]


@dataclass(frozen=True)
class BehaviourHistory:
    """Every completion of a run, step by step."""

    steps: dict[int, list[ReadCompletion]]

    @cached_property
    def tallies(self) -> dict[int, dict[str, Tally]]:
        return {step: tallies_of(rows) for step, rows in self.steps.items()}

    def shares(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the share of completions that show a behaviour in each."""
        return self._curve(name, lambda tally: tally.share)

    def signs(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the signs per 1000 completion tokens in each."""
        return self._curve(name, lambda tally: tally.per_1000_tokens)

    def _curve(self, name: str, value: Callable[[Tally], float]) -> tuple[list[int], list[float]]:
        found = {step: value(tallies[name]) for step, tallies in self.tallies.items() if name in tallies}
        return [*found.keys()], [*found.values()]

    def seen(self, name: str) -> bool:
        return any(tallies[name].num_shown for tallies in self.tallies.values() if name in tallies)

    def quarter(self, *, last: bool) -> list[ReadCompletion]:
        """The completions of the first or the last quarter of the steps."""
        steps = sorted(self.steps)
        some = max(1, len(steps) // 4)
        return [each for step in (steps[-some:] if last else steps[:some]) for each in self.steps[step]]


def tallies_of(rows: Iterable[ReadCompletion]) -> dict[str, Tally]:
    return tallies((each.signs, each.num_tokens) for each in rows)


def read_history(run: Path, reader: BehaviourReader) -> BehaviourHistory:
    """The rollouts of a run's folder.  Raises UserError if it has none."""
    files = {step: file for file in sorted(run.glob("rollouts/*.parquet")) if (step := rollout_step(file)) is not None}
    if not files:
        raise UserError(f"{run}: has no rollouts/step-N.parquet.  Name the folder of a `posttrain rl` run with a step.")
    import pyarrow.parquet as pq

    steps: dict[int, list[ReadCompletion]] = {}
    for step, file in sorted(files.items()):
        rows = pq.read_table(file, columns=["draw", "completion", "tokens", "reward", "columns"]).to_pylist()
        signs = [reader.read(row["completion"], json.loads(row["columns"])) for row in rows]
        steps[step] = [
            ReadCompletion((step, row["draw"]), len(row["tokens"]), row["reward"], each)
            for row, each in zip(rows, signs, strict=True)
        ]
    return BehaviourHistory(steps)


def share_with_interval(rows: Sequence[ReadCompletion], name: str) -> str:
    """Share of completions that show a behaviour, with its 95% interval over prompts; "" without a reading."""
    by_prompt: dict[tuple[int, int], list[bool]] = {}
    for each in rows:
        if name in each.signs:
            by_prompt.setdefault(each.prompt, []).append(each.signs[name].shown)
    if not by_prompt:
        return ""
    means = np.array([fmean(shown) for shown in by_prompt.values()])
    low, high = share_interval(means)
    return f"{means.mean():.3f} [{low:.3f}, {high:.3f}]"


def reward_by_behaviour(rows: Sequence[ReadCompletion], name: str, *, shown: bool) -> str:
    """Mean reward of the completions that show a behaviour (or do not)."""
    read = [each for each in rows if name in each.signs and each.signs[name].shown == shown]
    rewards = [each.reward for each in read if each.reward is not None]
    return f"{fmean(rewards):.3f}" if rewards else "—"


def history_table(history: BehaviourHistory, reader: BehaviourReader) -> str:
    """A Markdown table of behaviours in the first and last quarter of the steps; unseen ones are listed below it."""
    first, last = history.quarter(last=False), history.quarter(last=True)
    before, after = tallies_of(first), tallies_of(last)
    lines = [
        "| behaviour | what | first quarter | last quarter | signs per 1000 tokens | final reward with it | without |",
        "|---|---|---|---|---|---|---|",
    ]
    read = {name for tallies in history.tallies.values() for name in tallies}
    unseen = [name for name in reader.rows if name in read and not history.seen(name)]
    for name, row in reader.rows.items():
        if name in unseen:
            continue
        if name not in before or name not in after:
            lines.append(f"| `{name}` | {row.says} | not read: problems without numbers and target | | | | |")
            continue
        cells = [
            f"`{name}`",
            row.says,
            *(share_with_interval(rows, name) for rows in (first, last)),
            f"{before[name].per_1000_tokens:.2f} → {after[name].per_1000_tokens:.2f}",
            *(reward_by_behaviour(last, name, shown=shown) for shown in (True, False)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    footer = [f"\nNot seen in any completion: {', '.join(f'`{name}`' for name in unseen)}."] if unseen else []
    return "\n".join([*lines, *footer])


def draw_behaviours(history: BehaviourHistory, reader: BehaviourReader, picture: Path, title: str = "") -> None:
    """Two panels per kind of row: the share of completions that show it, and signs per 1000 tokens."""
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
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for index, (name, (steps, values)) in enumerate(zip(names, curves, strict=True)):
        colour = PALETTE[index % len(PALETTE)]
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, running_mean(values), color=colour, linewidth=2, label=name.replace("_", " "))
