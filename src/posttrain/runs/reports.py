"""What a run tells its watchers: records of a step, an evaluation, a checkpoint and the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, SupportsFloat, SupportsIndex

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.options.adapter import run_model
from posttrain.records import Grades, Group, Preference

Metrics = Mapping[str, float]


def as_number(value: object) -> float | None:
    """A number, of Python, numpy or torch, as Python's float; None for what is none, text with digits too."""
    if not isinstance(value, SupportsFloat | SupportsIndex):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several values in one, or too large
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCompletions:
    """Completions of held-out prompts with their scores."""

    groups: Sequence[Group]
    grades: Grades
    """Of the reward functions; where training pays by none of them, of the task's measure.  `rewards` is NaN where no
    reward was asked."""
    judged: Float64[Tensor, "prompt sample"]
    """The score that accuracy is computed from: 1 or more is a right answer; NaN where there is no score."""
    greedy: bool = False
    """Whether each token was the likeliest one; otherwise they were sampled at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTokens:
    """What one optimiser update computed for each of its tokens."""

    rollouts: Sequence[tuple[int, str, int]]
    """(draw, prompt id, sample) of each completion."""
    lengths: Sequence[int]
    """Sampled tokens of each completion."""
    columns: Mapping[str, Tensor]
    """Name -> a value for each token, completion after completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginReport:
    """The beginning of a run, or of its next part where it is resumed."""

    step: int
    """Steps finished before."""
    optimizer: torch.optim.Optimizer
    """What takes the steps, with the state of the checkpoint where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step."""

    step: int
    """Counted from 1; 0 is the state before training."""
    metrics: Metrics
    """Under the names of docs/metrics.md; watchers before this one have added theirs."""
    seconds: Metrics = field(default_factory=dict)
    """Wall time by stage."""
    num_tokens: int = 0
    """Tokens that the step's speed is told in."""
    groups: Sequence[Group] = ()
    """The groups that were trained on; none in a supervised run."""
    grades: Grades | None = None
    """What the rewards said of them."""
    advantages: Float64[Tensor, "prompt group"] | None = None
    """Of each completion, the mean over its tokens where an algorithm tells them apart."""
    token_rewards: Float64[Tensor, " token"] | None = None
    """What single tokens of those groups earned beside their completion, one completion after the other."""
    process_rewards: Float64[Tensor, " token"] | None = None
    """What reward functions marked of that; NaN where no step ends."""
    token_advantages: Float64[Tensor, " token"] | None = None
    """What each of those tokens was credited with."""
    token_values: Float64[Tensor, " token"] | None = None
    """What a critic expected before each of them; None without one."""
    replaced: Sequence[tuple[Sequence[Group], Grades]] = ()
    """Groups that dynamic sampling set aside."""
    pairs: Sequence[Preference] = ()
    """The pairs of answers that were learned."""
    updates: Sequence[UpdateTokens] = ()
    """The tokens of each update, with `run.keep_token_columns`."""

    def token_columns(self) -> dict[str, Float64[Tensor, " token"]]:
        """What is known of single tokens of the groups trained on, under the names of the rollout file."""
        columns = {
            "token_rewards": self.token_rewards,
            "process_rewards": self.process_rewards,
            "token_advantages": self.token_advantages,
            "token_values": self.token_values,
        }
        return {name: column for name, column in columns.items() if column is not None}

    def all_rollouts(self) -> tuple[list[Group], Grades, Float64[Tensor, "prompt group"]]:
        """The groups trained on, then those set aside, whose advantages are NaN."""
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
    """As in summary.json where it is a full one, else metrics."""
    groups: Sequence[Group] = ()
    """The sampled completions of a full one."""
    evaluation: Literal["before", "brief", "after"] = "brief"
    """`before` and `after` training everything is measured; `brief` ones are along the way."""
    completions: Sequence[ScoredCompletions] = ()
    """All of them with their scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """One checkpoint on the disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReport:
    """The end of a run."""

    step: int
    folder: Path
    summary: Mapping[str, object]
    """The content of summary.json; empty where the run was interrupted."""
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished, or interrupted, run."""

    folder: Path
    summary: Mapping[str, object]
    """The content of summary.json; empty where the run was interrupted."""
    interrupted: bool = False

    @property
    def model_folder(self) -> Path:
        """The trained model, for `from_pretrained` and for `posttrain chat`; its adapter where that alone was saved."""
        return run_model(self.folder)
