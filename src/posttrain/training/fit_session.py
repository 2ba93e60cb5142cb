"""The parts of a run on rows or pairs: their source, the objective of an update, and what is trained."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from posttrain.config import DpoConfig, RewardModelConfig, SftConfig
from posttrain.errors import RunError
from posttrain.models.adapters.in_force import adapter_dropout
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
from posttrain.training.optimizer import OwnOptimizer, apply_gradients, new_optimizer, next_rate, require_no_own
from posttrain.training.trained import FitState, Trained

FitConfig = SftConfig | RewardModelConfig | DpoConfig
Item = TypeVar("Item", bound=Example | Preference)
"""A row, or a pair."""
Made = TypeVar("Made", bound=Example | Preference, covariant=True)


class FitSource(Protocol[Made]):
    """Source of rows or pairs; `described` gives lines of the plan, `summary` entries of summary.json."""

    def batch(self, first: int, options: Any) -> Sequence[Made]:
        """The batch that starts with this row or pair, counted from the start of the run."""

    def num_steps(self, options: Any) -> int | None:
        """Number of updates of the whole run; None: `run.num_steps` decides."""

    def described(self) -> Sequence[str]: ...

    def summary(self) -> Mapping[str, object]: ...


class FitObjective(Generic[Item]):
    """The loss of an update, held-out measurements, and what the run reports and saves.

    Checkpoints hold its `tensors` and `state`; `loss_lines` and `batch_words` are for the plan.
    """

    by_stage: ClassVar[bool] = False
    """Whether metrics have the seconds of each stage."""
    measures_at_end: ClassVar[bool] = False
    """Whether a finished run is measured again even if its last step was measured."""
    policy: Policy
    options: SftOptions | PairOptions
    run: FitState
    held_out: Sequence[Item]

    def optimizer(self) -> torch.optim.Optimizer:
        return new_optimizer(self.policy.model.parameters(), self.options)

    def head(self) -> Mapping[str, nn.Module]:
        """Trained modules other than the policy, by their file in checkpoints."""
        return {}

    def begin(self, harness: Harness) -> None:
        """Prepare for the first update of a new run."""

    def before_step(self, step: int, harness: Harness) -> StepReport:
        return StepReport(step=step, metrics={})

    def accumulate(self, batch: Sequence[Item]) -> dict[str, float]:
        """Add the gradient of the batch's loss, a micro-batch at a time; returns metrics, the `loss` among them."""
        raise NotImplementedError

    def counted(self, batch: Sequence[Item]) -> dict[str, float]:
        """Counts of a batch, which may be empty, as metrics."""
        return {}

    def num_tokens(self, batch: Sequence[Item]) -> int:
        """Number of tokens of a batch."""
        raise NotImplementedError

    def is_due(self, step: int, num_steps: int) -> bool:
        return step % self.options.eval_every == 0 or step == num_steps

    def evaluate(self, harness: Harness, *, full: bool) -> dict[str, float]:
        """Measure held-out rows or pairs and report the results; empty if there are none."""
        if not self.held_out:
            return {}
        with harness.clock("evaluate"):
            with self.policy.ranks.leading("measured"):
                metrics, results = self.measured()
            harness.evaluated(EvaluationReport(step=self.run.step, results=metrics))
        self.keep_measured(harness.folder)
        self.run.saw_evaluation(results)
        return metrics

    def measured(self) -> tuple[dict[str, float], Mapping[str, object]]:
        """Results on one or more held-out rows or pairs: as metrics, and for summary.json."""
        raise NotImplementedError

    def keep_measured(self, folder: RunFolder) -> None:
        """Write the measurements of single rows, if any."""

    def score(self, metrics: Metrics) -> float | None:
        """Ranks checkpoints; the lowest held-out loss is the best."""
        loss = metrics.get("eval/loss")
        return None if loss is None else -loss

    def tensors(self) -> Mapping[str, Tensors]:
        return {}

    def state(self) -> Mapping[str, object]:
        return {}

    def restore(self, saved: Checkpoint) -> None: ...

    @property
    def num_held_out(self) -> int:
        return len(self.held_out)

    def rehearse(self) -> list[str]:
        """Prepare a first batch in a dry run; returns lines of the plan."""
        return []

    def memory(self, shape: ModelShape, *, on_cuda: bool) -> MemorySetup:
        raise NotImplementedError

    def loss_lines(self) -> list[str]:
        return []

    def batch_words(self) -> str:
        raise NotImplementedError

    def answers(self, pair: Preference) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of both answers as the model reads them."""
        return pair.chosen.tokens, pair.rejected.tokens

    def save(self, folder: RunFolder) -> None:
        """Save the trained model and pictures of the run."""
        raise NotImplementedError

    def summary(self) -> dict[str, object]:
        raise NotImplementedError

    def result_lines(self, folder: Path) -> list[str]:
        raise NotImplementedError


def scored_pairs(
    objective: FitObjective[Preference], chosen: Sequence[float], rejected: Sequence[float]
) -> list[dict[str, object]]:
    """Rows of held_out.jsonl: each held-out pair with the scores of its answers, and their texts."""
    decode = objective.policy.tokenizer.decode
    rows: list[dict[str, object]] = []
    for pair, *scores in zip(objective.held_out, chosen, rejected, strict=True):
        texts = [str(decode([*tokens])) for tokens in (pair.prompt.tokens, *objective.answers(pair))]
        numbers = {"where": pair.where, "chosen": scores[0], "rejected": scores[1]}
        rows.append({**numbers, **dict(zip(("prompt", "chosen_text", "rejected_text"), texts, strict=True))})
    return rows


class FitSession(Generic[Item]):
    """The parts of a run on rows or pairs.  A caller's optimiser replaces AdamW."""

    def __init__(
        self,
        config: FitConfig,
        model_name: str,
        source: FitSource[Item],
        objective: FitObjective[Item],
        *,
        own_optimizer: OwnOptimizer | None = None,
    ) -> None:
        require_whole_adapter(objective.policy.model)
        self.config, self.model_name, self.source, self.objective = config, model_name, source, objective
        if objective.policy.ranks.size > 1:
            require_no_own(own_optimizer)
        optimizer = own_optimizer or objective.optimizer()
        self.trained: Trained[FitState] = Trained(
            objective.policy, optimizer, objective.run, parts=[objective], head=objective.head()
        )
        self.num_steps = source.num_steps(objective.options) or config.run.num_steps
        """Number of updates of the whole run."""

    def learn(self, step: int) -> tuple[Sequence[Item], dict[str, float]]:
        """Take one optimiser step on the next batch unless it is empty; returns the batch and its metrics."""
        with self.trained.policy.ranks.leading("learn", step):
            return self._learn(step)

    def _learn(self, step: int) -> tuple[Sequence[Item], dict[str, float]]:
        objective, trained, options = self.objective, self.trained, self.objective.options
        run = trained.run
        run.step = step
        rate = next_rate(options, trained.own_optimizer, step - 1, self.num_steps)
        batch, ranks = self.source.batch(run.first, options), trained.policy.ranks
        ranks.agree("the rows or pairs", lambda: hashlib.sha256(repr(batch).encode()).hexdigest())
        if not batch:
            return batch, {**objective.counted(batch), "learning_rate": rate}
        trained.optimizer.zero_grad(set_to_none=True)
        with adapter_dropout(trained.policy.model, self.config.run.seed, step):
            metrics = objective.accumulate(batch)
        grad_norm = math.hypot(*apply_gradients(trained.optimizer, rate, options.max_grad_norm).values())
        if not math.isfinite(grad_norm):
            remedy = f"No step was taken.  Start again with a lower {options.section}.learning_rate."
            raise RunError(f"loss {metrics['loss']}, gradient norm {grad_norm}.  {remedy}")
        run.count(len(batch), objective.num_tokens(batch))
        counted = {**objective.counted(batch), "num_tokens": float(run.num_tokens)}
        return batch, {**metrics, "grad_norm": grad_norm, "learning_rate": rate, **counted}


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
