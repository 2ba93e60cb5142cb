"""What the training of a reward model changes, and what it remembers between steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch

from posttrain.errors import RunError
from posttrain.models.adapters.in_force import adapter_dropout
from posttrain.models.classifiers.heads import TextScorer
from posttrain.options.reward_training import RewardTrainingOptions
from posttrain.records import Preference
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.tensor_state import (
    Tensors,
    frozen_state,
    module_tensors,
    optimizer_tensors,
    require_same_frozen,
    restore_module,
    restore_optimizer,
)
from posttrain.training.optimizer import (
    POLICY,
    OwnOptimizer,
    ParameterGroup,
    apply_gradients,
    new_optimizer,
    next_rate,
)
from posttrain.training.reward_model.calibration import HeldOutPairs
from posttrain.training.reward_model.pair_scores import accumulate_pairs, read_answers

HEAD = "head"


@dataclass(slots=True, kw_only=True)
class RewardModelState:
    """What a run remembers between steps, besides weights."""

    step: int = 0
    next_pair: int = 0
    num_tokens: int = 0
    """Those of prompts counted with each of their answers."""
    seconds: float = 0.0
    best_accuracy: float | None = None
    before: dict[str, object] = field(default_factory=dict)
    """What was measured before training, as summary.json has it."""
    after: dict[str, object] = field(default_factory=dict)
    """What was measured last."""

    def saw_evaluation(self, measured: HeldOutPairs) -> None:
        """Keep a measurement in mind; one before training is no result of it."""
        if not self.step:
            self.before = measured.summary()
            return
        self.after = measured.summary()
        self.best_accuracy = max(measured.accuracy, self.best_accuracy or 0.0)


class TrainedByPreferences:
    """A body and its head, their optimiser and the counters of the run."""

    def __init__(
        self,
        scorer: TextScorer,
        options: RewardTrainingOptions,
        *,
        seed: int = 0,
        optimizer: OwnOptimizer | None = None,
    ) -> None:
        """The seed is for an adapter's dropout."""
        self.scorer, self.options, self.run, self.seed = scorer, options, RewardModelState(), seed
        self.own_optimizer = optimizer
        body = ParameterGroup(module=POLICY, parameters=scorer.body_parameters)
        head = ParameterGroup(module=HEAD, parameters=scorer.head.parameters(), rate_scale=options.head_rate_scale)
        self.optimizer: torch.optim.Optimizer = (
            new_optimizer([body, head], options) if optimizer is None else optimizer.optimizer
        )

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.run.step

    @property
    def seconds(self) -> float:
        """What they have taken, in all lives of the run."""
        return self.run.seconds

    def learn(self, batch: Sequence[Preference], step: int, num_steps: int) -> dict[str, float]:
        """Take one optimiser step on a batch of pairs; returns its metrics."""
        with adapter_dropout(self.scorer.policy.model, self.seed, step):
            loss, scores = accumulate_pairs(self.scorer, batch, self.options)
        rate = next_rate(self.options, self.own_optimizer, step - 1, num_steps)
        norms = apply_gradients(self.optimizer, rate, self.options.max_grad_norm)
        grad_norm = math.hypot(*norms.values())
        if not math.isfinite(grad_norm):
            raise RunError(f"loss {loss}, gradient norm {grad_norm}; lower reward_model.learning_rate.")
        self.run.step = step
        self.run.next_pair += len(batch)
        self.run.num_tokens += num_tokens(batch)
        counted = {"learning_rate": rate, "grad_norm": grad_norm, "num_tokens": float(self.run.num_tokens)}
        return {"loss": loss, **scores.metrics(), **counted}

    def tensors(self) -> Mapping[str, Tensors]:
        """All tensors that the next step reads."""
        return {
            "policy": module_tensors(self.scorer.policy.model),
            HEAD: module_tensors(self.scorer.head),
            "optimizer": optimizer_tensors(self.optimizer)[0],
        }

    @cached_property
    def frozen(self) -> Mapping[str, object]:
        """What checkpoints say of the weights that they leave out; those never change."""
        model = self.scorer.policy.model
        return frozen_state(model, model.name_or_path or "a model object")

    def state(self) -> Mapping[str, object]:
        """Whatever else it reads, as plain data."""
        return {"run": asdict(self.run), "optimizer": optimizer_tensors(self.optimizer)[1], **self.frozen}

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count the time of a step."""
        self.run.seconds += sum(seconds.values())

    def restore(self, saved: Checkpoint) -> None:
        """Be as the checkpoint was."""
        optimizer, run = saved.state["optimizer"], saved.state["run"]
        assert isinstance(optimizer, Mapping)
        assert isinstance(run, Mapping)
        require_same_frozen(self.frozen, saved.state)
        if self.own_optimizer is not None:
            self.own_optimizer.advance(max(0, saved.step - 1))
        restore_module(self.scorer.policy.model, saved.tensors["policy"])
        restore_module(self.scorer.head, saved.tensors[HEAD])
        restore_optimizer(self.optimizer, saved.tensors["optimizer"], optimizer)
        self.run = RewardModelState(**run)


def num_tokens(pairs: Sequence[Preference]) -> int:
    """Tokens of pairs, those of a prompt counted with each of its answers."""
    return sum(len(pair.prompt.tokens) + len(answer) for pair in pairs for answer in read_answers(pair))
