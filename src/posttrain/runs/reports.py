"""Reports for watchers: on a step, an evaluation, a checkpoint and the end; and summary.json, for other programs."""

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, SupportsFloat, SupportsIndex, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import RunError
from posttrain.options.model import run_model
from posttrain.records import Grades, Group, Preference
from posttrain.runs.folder import require_run_folder
from posttrain.runs.rollout_tables import Kept, pandas_frame, rollout_table

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

Metrics = Mapping[str, float]


def as_number(value: object) -> float | None:
    """A Python, numpy or torch number as a float; None for anything else, including text."""
    if not isinstance(value, SupportsFloat | SupportsIndex):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several values, or too large
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCompletions:
    """Completions of held-out prompts with their scores."""

    groups: Sequence[Group]
    grades: Grades
    """Grades by the reward functions, or by the task's measure if training does not use it.  `rewards` is NaN if no
    reward was computed."""
    judged: Float64[Tensor, "prompt sample"]
    """The score behind accuracy: 1 or more is correct; NaN if there is no score."""
    greedy: bool = False
    """Whether completions are greedy; otherwise they were sampled at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTokens:
    """Numbers that one optimiser update computed for its tokens, or that were computed after a step's last update."""

    rollouts: Sequence[tuple[int, str, int]]
    """(draw, prompt id, sample) of each completion."""
    lengths: Sequence[int]
    """Sampled tokens of each completion."""
    columns: Mapping[str, Tensor]
    """Name -> a value for each token, completion after completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginReport:
    """The start of a run, or of its resume."""

    step: int
    """Number of steps finished before."""
    optimizer: torch.optim.Optimizer
    """The policy, with the state of the checkpoint, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    step: int
    """Counted from 1; 0 is the state before training."""
    metrics: Metrics
    """Metrics by their names in docs/metrics.md, including metrics added by earlier watchers."""
    seconds: Metrics = field(default_factory=dict)
    """Wall time in seconds by stage."""
    num_tokens: int = 0
    """Number of tokens that the step's speed is computed from."""
    groups: Sequence[Group] = ()
    """The groups that were trained on; empty in a supervised run."""
    grades: Grades | None = None
    advantages: Float64[Tensor, "prompt group"] | None = None
    """Advantage of each completion; the mean over its tokens if they differ."""
    token_rewards: Float64[Tensor, " token"] | None = None
    """Rewards of single tokens, in the order of those groups."""
    process_rewards: Float64[Tensor, " token"] | None = None
    """The part of them that reward functions marked; NaN if no step ends at the token."""
    token_advantages: Float64[Tensor, " token"] | None = None
    token_values: Float64[Tensor, " token"] | None = None
    """A critic's values; None without one."""
    replaced: Sequence[tuple[Sequence[Group], Grades]] = ()
    """Groups that dynamic sampling set aside."""
    pairs: Sequence[Preference] = ()
    updates: Sequence[UpdateTokens] = ()
    """The token columns of each update, with `run.keep_token_columns`."""
    updated: UpdateTokens | None = None
    """The same for all completions of `groups`, by the policy after the last update."""

    def token_columns(self) -> dict[str, Float64[Tensor, " token"]]:
        """The columns with a number per token, by their names in the rollout file."""
        columns = {
            "token_rewards": self.token_rewards,
            "process_rewards": self.process_rewards,
            "token_advantages": self.token_advantages,
            "token_values": self.token_values,
        }
        return {name: column for name, column in columns.items() if column is not None}

    def all_rollouts(self) -> tuple[list[Group], Grades, Float64[Tensor, "prompt group"]]:
        """The groups that were trained on, then those set aside, with NaN as their advantages."""
        assert self.grades is not None, "a step without rollouts"
        assert self.advantages is not None
        groups, grades, advantages = list(self.groups), self.grades, self.advantages
        for more_groups, more_grades in self.replaced:
            groups += more_groups
            grades = grades.joined(more_grades)
            advantages = torch.cat([advantages, torch.full_like(more_grades.rewards, torch.nan)])
        return groups, grades, advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """One measurement on held-out data."""

    step: int
    results: Mapping[str, object]
    """Results as in summary.json for a full evaluation, else metrics."""
    groups: Sequence[Group] = ()
    """The sampled completions of a full evaluation."""
    evaluation: Literal["before", "brief", "after"] = "brief"
    """Full ones are `before` and `after` training, `brief` ones between steps."""
    completions: Sequence[ScoredCompletions] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """One checkpoint on disk."""

    step: int
    path: Path


class HtmlBlock(Protocol):
    """An object that a notebook shows as HTML."""

    def _repr_html_(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished, or interrupted, run."""

    folder: Path
    summary: Mapping[str, object]
    """The content of summary.json; empty if the run was interrupted."""
    interrupted: bool = False

    @property
    def model_folder(self) -> Path:
        """The trained model, for `from_pretrained` and `posttrain chat`; or its adapter if only that was saved."""
        return run_model(self.folder)

    def rollouts(
        self, kept: Kept = "rollouts", *, steps: Collection[int] | None = None, columns: Sequence[str] | None = None
    ) -> "pa.Table":
        """Every completion of the run as a pyarrow table; docs/run_folder.md lists its columns.

        `steps` and `columns` choose what is read.  `kept="evaluations"` has the held-out completions.
        """
        return rollout_table(self.folder, kept, steps=steps, columns=columns)

    def to_pandas(
        self, kept: Kept = "rollouts", *, steps: Collection[int] | None = None, columns: Sequence[str] | None = None
    ) -> "pandas.DataFrame":
        """The same as a pandas DataFrame.  Raises UserError if pandas is not installed."""
        return pandas_frame(self.rollouts(kept, steps=steps, columns=columns))

    def show(self, *, size: str = "3MB", height: int = 720) -> "HtmlBlock":
        """The run in a notebook: the viewer's page in a frame of this height, without a server.

        It contains as many rollouts as fit `size`, and says how many are left out; `posttrain view` shows all.
        """
        # By name: the viewer is above what it reads, and loaded only here.
        notebook = import_module("posttrain.viewer.exported.notebook")
        page: HtmlBlock = notebook.notebook_page(self.folder, size=size, height=height)
        return page


def open_run(folder: str | Path) -> Run:
    """The run in a folder, finished or not, to look at.  Raises UserError for another folder."""
    folder = Path(folder)
    require_run_folder(folder)
    file, summary = folder / "summary.json", dict[str, object]()
    if file.is_file():
        try:
            summary = json.loads(file.read_bytes())
        except ValueError as error:
            raise RunError(f"{file}: damaged: not JSON ({error}).  Restore the file or delete it.") from error
    return Run(folder=folder, summary=summary, interrupted=not summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport(Run):
    """The end of a run."""

    step: int


HELD_OUT = ("accuracy_sampled", "accuracy_greedy", "pass_at_8")
"""Held-out results with an interval, `<name>_interval` = [low, high]."""
SCORE, LEFT_OUT = "score", "accuracy"
"""The mean score by the task's measure, which replaces accuracy if scores are counts; and the reason."""
REWARD = "reward"
"""The mean reward as in training; None in runs of early versions."""
PACKAGES = ("posttrain", "torch", "transformers", "safetensors", "tokenizers", "numpy")
"""Packages that can affect a run's numbers."""


def held_out_results(results: Mapping[str, object]) -> dict[str, object]:
    """Results in the form of summary.json, for every version that measured them."""
    required = [*HELD_OUT, *(f"{name}_interval" for name in HELD_OUT), "mean_length"]
    missing = [name for name in required if name not in results]
    assert not missing, f"evaluation without {', '.join(missing)}"
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in results.items()}
    return {name: plain[name] for name in required} | {REWARD: None, f"{REWARD}_interval": None} | plain


def headline(results: Mapping[str, object], prefix: str = "") -> tuple[str, float] | None:
    """The main held-out result: the accuracy at temperature 1, else the mean score, else the mean reward."""
    for name in ("accuracy_sampled", SCORE, REWARD):
        value = results.get(prefix + name)
        if isinstance(value, int | float):
            return name, float(value)
    return None


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def problems_suffix(results: Mapping[str, object], name: str) -> str:
    """How many problems a number rests on, if it is not all of them."""
    sizes = cast(Mapping[str, Mapping[str, int]], results.get("measured_on", {}))
    count = sizes.get(name, {}).get("problems", results.get("num_problems"))
    return "" if count == results.get("num_problems") else f", {count} problems"
