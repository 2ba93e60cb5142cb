"""What a run on rows or pairs is made of: where they come from, what an update minimises, and what is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from posttrain.config import DpoConfig, RewardModelConfig, SftConfig
from posttrain.models.adapters.peft_layers import require_whole_adapter
from posttrain.models.conversation_masks import Masking
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.model_shape import ModelShape
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, Preference
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.harness import Harness
from posttrain.runs.reports import EvaluationReport, Metrics, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import Tensors
from posttrain.tasks.preference_set import PreferenceSet, preference_set
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training.optimizer import OwnOptimizer, new_optimizer
from posttrain.training.trained import FitState, Trained

FitConfig = SftConfig | RewardModelConfig | DpoConfig
Item = TypeVar("Item", bound=Example | Preference)
"""A row, or a pair."""
Made = TypeVar("Made", bound=Example | Preference, covariant=True)


class FitSource(Protocol[Made]):
    """Where rows or pairs come from."""

    def batch(self, first: int, options: Any) -> Sequence[Made]:
        """The batch of an update that begins with this row or pair, counted from the beginning of the run."""
        ...

    def num_steps(self, options: Any) -> int | None:
        """Updates of the whole run; None where `run.num_steps` decides."""
        ...

    def described(self) -> Sequence[str]:
        """Lines of the plan."""
        ...

    def summary(self) -> Mapping[str, object]:
        """Entries of summary.json."""
        ...


@dataclass(frozen=True, slots=True)
class HeldOutResults:
    """Results on held-out rows or pairs."""

    metrics: Metrics
    """Under the names of docs/metrics.md."""
    results: Mapping[str, object]
    """As summary.json has them."""


class FitObjective(Generic[Item]):
    """What an update minimises, what is measured on held-out rows or pairs, and what the run reports and saves.

    It is a part of what is trained: checkpoints hold its `tensors` and `state`.
    """

    by_stage: ClassVar[bool] = False
    """Whether metrics have the seconds of each stage."""
    measures_at_end: ClassVar[bool] = False
    """Whether a finished run is measured once more, even if its last step was."""
    policy: Policy
    options: SftOptions | PairOptions
    run: FitState
    held_out: Sequence[Item]

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over all that is trained."""
        return new_optimizer(self.policy.model.parameters(), self.options)

    def head(self) -> Mapping[str, nn.Module]:
        """What is trained beside the policy, by its file in checkpoints."""
        return {}

    def begin(self, harness: Harness) -> None:
        """Prepare for the first update of a new run."""

    def before_step(self, step: int, harness: Harness) -> StepReport:
        """Prepare for a step; returns what is to report of that."""
        return StepReport(step=step, metrics={})

    def accumulate(self, batch: Sequence[Item]) -> dict[str, float]:
        """Add the gradient of the batch's loss, a micro-batch at a time; returns metrics, the `loss` among them."""
        raise NotImplementedError

    def counted(self, batch: Sequence[Item]) -> dict[str, float]:
        """Metrics that count a batch, which may be empty."""
        return {}

    def num_tokens(self, batch: Sequence[Item]) -> int:
        """Tokens of a batch."""
        raise NotImplementedError

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether a step is measured."""
        return step % self.options.eval_every == 0 or step == num_steps

    def evaluate(self, harness: Harness, *, full: bool) -> dict[str, float]:
        """Measure held-out rows or pairs, and report it; no metrics where there are none."""
        if not self.held_out:
            return {}
        with harness.clock("evaluate"):
            found = self.measured()
            harness.evaluated(EvaluationReport(step=self.run.step, results=found.metrics))
        self.run.saw_evaluation(found.results)
        return dict(found.metrics)

    def measured(self) -> HeldOutResults:
        """The held-out rows or pairs, of which there is one at least, under the policy as it is."""
        raise NotImplementedError

    def score(self, metrics: Metrics) -> float | None:
        """Ranks checkpoints: that of the lowest held-out loss is the best."""
        loss = metrics.get("eval/loss")
        return None if loss is None else -loss

    def tensors(self) -> Mapping[str, Tensors]:
        """Further tensors of a checkpoint."""
        return {}

    def state(self) -> Mapping[str, object]:
        """Further state of a checkpoint, JSON-serialisable."""
        return {}

    def restore(self, saved: Checkpoint) -> None:
        """Restore both."""

    @property
    def num_held_out(self) -> int:
        """Rows, pairs or problems that the run is measured on."""
        return len(self.held_out)

    def rehearse(self) -> list[str]:
        """Prepare a first batch in a dry run; returns lines of the plan."""
        return []

    def memory(self, shape: ModelShape, *, on_cuda: bool) -> MemorySetup:
        """What decides the run's memory."""
        raise NotImplementedError

    def loss_lines(self) -> list[str]:
        """Lines of the plan about the loss."""
        return []

    def batch_words(self) -> str:
        """The size of a batch in words."""
        raise NotImplementedError

    def answers(self, pair: Preference) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of both answers of a pair, as they are read."""
        return pair.chosen.tokens, pair.rejected.tokens

    def save(self, folder: RunFolder) -> None:
        """Save the trained model, and pictures of the run."""
        raise NotImplementedError

    def summary(self) -> dict[str, object]:
        """Entries of summary.json that only such runs have."""
        raise NotImplementedError

    def result_lines(self, folder: Path) -> list[str]:
        """The last lines of a finished run: its results, and where its model is."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSession(Generic[Item]):
    """Everything that a run on rows or pairs works with."""

    config: FitConfig
    model_name: str
    """What the plan calls the model."""
    source: FitSource[Item]
    objective: FitObjective[Item]
    own_optimizer: OwnOptimizer | None = None
    """A caller's, in place of AdamW."""
    trained: Trained[FitState] = field(init=False)
    num_steps: int = field(init=False)
    """Updates of the whole run, counted once: of rows it takes a pass over their lengths."""

    def __post_init__(self) -> None:
        objective = self.objective
        require_whole_adapter(objective.policy.model)
        optimizer = self.own_optimizer or objective.optimizer()
        made = Trained(objective.policy, optimizer, objective.run, parts=[objective], head=objective.head())
        object.__setattr__(self, "trained", made)
        num_steps = self.source.num_steps(objective.options) or self.config.run.num_steps
        object.__setattr__(self, "num_steps", num_steps)


def pairs_of_rows(
    config: RewardModelConfig | DpoConfig, options: PairOptions, policy: Policy, given: GivenRows
) -> PreferenceSet:
    assert isinstance(config.task, DatasetOptions), "a rule of the config"
    return preference_set(
        Masking.of(policy, renderer_of(policy, config.model.template_options)),
        config.task,
        options,
        longest=min(options.max_length or policy.max_positions, policy.max_positions),
        seed=config.run.seed,
        given=given,
    )
