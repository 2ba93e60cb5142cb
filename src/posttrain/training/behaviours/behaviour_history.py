"""Behaviours over a run that has been made: read from its rollouts/, whatever its recipe measured.

Every completion of a step is read, those too that dynamic sampling set aside.  Beside the shares stands the mean reward
of completions with and without a behaviour: whether what is shown goes with what is paid.  It is no effect: long
completions differ from short ones in more than words.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from posttrain.errors import UserError
from posttrain.runs.intervals import share_interval
from posttrain.runs.run_folder import rollout_step
from posttrain.training.behaviours.behaviour_reader import BehaviourReader
from posttrain.training.behaviours.search_signs import Signs


@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """One completion of a step, and what it shows."""

    prompt: tuple[int, int]
    """Step and draw: completions of one prompt are no independent samples."""
    num_tokens: int
    reward: float | None
    signs: dict[str, Signs]


@dataclass(frozen=True, slots=True)
class BehaviourHistory:
    """Every completion of a run, step by step."""

    steps: dict[int, list[ReadCompletion]] = field(default_factory=dict)

    def shares(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the share of completions that show a behaviour in each."""
        told = {step: [each.signs[name].shown for each in of_step(rows, name)] for step, rows in self.steps.items()}
        return [step for step, shown in told.items() if shown], [fmean(shown) for shown in told.values() if shown]

    def seen(self, name: str) -> bool:
        """Whether any completion shows a behaviour."""
        return any(each.signs[name].shown for rows in self.steps.values() for each in of_step(rows, name))

    def signs(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the signs per 1000 completion tokens in each."""
        told = {step: of_step(rows, name) for step, rows in self.steps.items()}
        told = {step: rows for step, rows in told.items() if rows}
        return [*told], [per_1000_tokens(rows, name) for rows in told.values()]

    def quarter(self, *, last: bool) -> list[ReadCompletion]:
        """The completions of the first or the last quarter of the steps."""
        steps = sorted(self.steps)
        some = max(1, len(steps) // 4)
        return [each for step in (steps[-some:] if last else steps[:some]) for each in self.steps[step]]


def of_step(rows: Sequence[ReadCompletion], name: str) -> list[ReadCompletion]:
    """Those completions that a behaviour is read in."""
    return [each for each in rows if name in each.signs]


def per_1000_tokens(rows: Sequence[ReadCompletion], name: str) -> float:
    """Signs of a behaviour per 1000 tokens of the completions that it is read in, of which there are some."""
    read = of_step(rows, name)
    return 1000 * sum(each.signs[name].count for each in read) / sum(each.num_tokens for each in read)


def read_history(run: Path, reader: BehaviourReader) -> BehaviourHistory:
    """The rollouts of a run's folder.  Raises UserError where there are none."""
    files = {step: file for file in sorted(run.glob("rollouts/*.parquet")) if (step := rollout_step(file)) is not None}
    if not files:
        raise UserError(
            f"{run}: has no rollouts/step-N.parquet to read.  Name the folder of a run of `posttrain rl` that has taken"
            " a step."
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
    """Share of completions that show a behaviour, and its 95% interval over prompts; None where it is not read."""
    by_prompt: dict[tuple[int, int], list[bool]] = {}
    for each in of_step(rows, name):
        by_prompt.setdefault(each.prompt, []).append(each.signs[name].shown)
    if not by_prompt:
        return None
    means = np.array([fmean(shown) for shown in by_prompt.values()])
    return (float(means.mean()), *share_interval(means))


def reward_by_behaviour(rows: Sequence[ReadCompletion], name: str, *, shown: bool) -> float | None:
    """Mean reward of the completions that show a behaviour, or do not; None where there is none such."""
    rewards = [
        each.reward for each in of_step(rows, name) if each.reward is not None and each.signs[name].shown == shown
    ]
    return fmean(rewards) if rewards else None


def history_table(history: BehaviourHistory, reader: BehaviourReader) -> str:
    """A Markdown table: each behaviour in the first and the last quarter of the steps, and what goes with it.

    Behaviours that no completion shows are listed below it.
    """
    first, last = history.quarter(last=False), history.quarter(last=True)
    lines = [
        "| behaviour | what | first quarter | last quarter | signs per 1000 tokens | reward with, at last | without |",
        "|---|---|---|---|---|---|---|",
    ]
    read = {name for name in reader.rows if any(of_step(rows, name) for rows in history.steps.values())}
    unseen = [name for name in reader.rows if name in read and not history.seen(name)]
    for name, row in reader.rows.items():
        if name in unseen:
            continue
        before, after = share_with_interval(first, name), share_with_interval(last, name)
        if before is None or after is None:
            lines.append(f"| `{name}` | {row.says} | not read: problems without numbers and target | | | | |")
            continue
        signs = " → ".join(f"{per_1000_tokens(rows, name):.2f}" for rows in (first, last))
        paid = [reward_by_behaviour(last, name, shown=shown) for shown in (True, False)]
        lines.append(
            f"| `{name}` | {row.says} | {interval(before)} | {interval(after)} | {signs}"
            f" | {' | '.join('—' if each is None else f'{each:.3f}' for each in paid)} |"
        )
    told = [f"\nNot seen in any completion: {', '.join(f'`{name}`' for name in unseen)}."] if unseen else []
    return "\n".join([*lines, *told])


def interval(numbers: tuple[float, float, float]) -> str:
    """A share with its interval."""
    share, low, high = numbers
    return f"{share:.3f} [{low:.3f}, {high:.3f}]"
