"""Counts signs of behaviours in completions, per step and per evaluation.

Each row has two numbers: the share of completions that show it, and its signs per 1000 completion tokens.  Longer
completions show more of everything.  If the share rises and the signs per token do not, only the length has grown.

Completions are hostile: `(a|aa)+c` tries 2^n ways on n times `a`.  Each pattern has a time limit per completion.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import regex

from posttrain.behaviours import behaviour_table
from posttrain.errors import UserError
from posttrain.records import Group
from posttrain.rewards.countdown import puzzle
from posttrain.rewards.parsing.tags import END_THINK
from posttrain.runs.curves import PALETTE, dress, running_mean
from posttrain.runs.files import save_figure
from posttrain.runs.intervals import share_interval
from posttrain.runs.run_folder import rollout_step
from posttrain.tasks.base import Probe, Reading

SHARE, SIGNS = "behaviour", "behaviour_signs"
"""Prefixes of metrics: `behaviour/<name>`, a share, and `behaviour_signs/<name>`, per 1000 tokens."""
MAX_CHARACTERS = 20_000
"""Characters of a completion that are searched; 400 tokens of the bundled model are about 600."""
TIMEOUT_SECONDS = 0.5
"""Processor time of one pattern on one completion."""


class PatternTimeout(RuntimeWarning):
    """A pattern that took too long on a completion, which is then left out of its row."""


@dataclass(slots=True)
class Tally:
    """Counts of one behaviour over some completions."""

    num_shown: int = 0
    num_signs: int = 0
    num_completions: int = 0
    num_tokens: int = 0

    def add(self, signs: behaviour_table.Signs, num_tokens: int) -> None:
        self.num_shown += signs.shown
        self.num_signs += signs.count
        self.num_completions += 1
        self.num_tokens += num_tokens

    @property
    def share(self) -> float:
        return self.num_shown / self.num_completions

    @property
    def per_1000_tokens(self) -> float:
        return 1000 * self.num_signs / self.num_tokens


@dataclass(frozen=True)
class BehaviourReader:
    """Finds the signs of the chosen rows in completions."""

    rows: Mapping[str, behaviour_table.Row]
    timeout_seconds: float = TIMEOUT_SECONDS

    @cached_property
    def patterns(self) -> Mapping[str, tuple[regex.Pattern[str], ...]]:
        return {
            name: tuple(regex.compile(each, regex.IGNORECASE) for each in row.patterns)
            for name, row in self.rows.items()
            if isinstance(row, behaviour_table.PatternRow)
        }

    def read(self, text: str, columns: Mapping[str, object]) -> dict[str, behaviour_table.Signs]:
        """The signs of each row in the first `MAX_CHARACTERS` of a completion.

        A row is missing if it reads a Countdown search and the problem has no columns `numbers` and `target`, or if
        one of its patterns timed out, which is a warning.
        """
        text = text[:MAX_CHARACTERS]
        thinking = text.partition(END_THINK)[0]
        found, search = dict[str, behaviour_table.Signs](), None
        if (
            any(isinstance(row, behaviour_table.SearchRow) for row in self.rows.values())
            and {"numbers", "target"} <= columns.keys()
        ):
            search = behaviour_table.read_search(
                puzzle(columns["numbers"], columns["target"], columns.get("rule", "all")), text
            )
        for name, row in self.rows.items():
            if isinstance(row, behaviour_table.SearchRow):
                found |= {} if search is None else {name: row.read(search)}
                continue
            within = thinking if row.within == "thinking" else text
            try:
                count = num_signs(self.patterns[name], within, timeout_seconds=self.timeout_seconds)
                found[name] = behaviour_table.Signs(count, count >= row.at_least)
            except TimeoutError:
                slow = f"took more than {self.timeout_seconds} s on a completion of {len(within)} characters"
                remedy = "Bound its repeats, such as \\w{1,20} for \\w+."
                told = f"behaviours: {name}: a pattern {slow}, now left out. {remedy}"
                warnings.warn(told, PatternTimeout, stacklevel=2)
        return found

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


def tallies(completions: Iterable[tuple[Mapping[str, behaviour_table.Signs], int]]) -> dict[str, Tally]:
    """The tally of each row over completions, each its signs and its number of tokens."""
    found: dict[str, Tally] = {}
    for signs, num_tokens in completions:
        for name, each in signs.items():
            found.setdefault(name, Tally()).add(each, num_tokens)
    return found


def num_signs(patterns: Iterable[regex.Pattern[str]], text: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
    """The stretches of a text that some pattern matches; overlapping matches are one.  Raises TimeoutError."""
    spans = [match.span() for pattern in patterns for match in pattern.finditer(text, timeout=timeout_seconds)]
    count, end = 0, 0
    for first, last in sorted(spans):
        count += first >= end
        end = max(end, last)
    return count


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
        "| behaviour | what | first quarter | last quarter | signs per 1000 tokens | reward with, at last | without |",
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
