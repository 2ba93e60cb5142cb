"""What a supervised run trains, and what it remembers between steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch

from posttrain.errors import RunError
from posttrain.models.adapters.in_force import adapter_dropout
from posttrain.models.policy import Policy
from posttrain.options.training import SftOptions
from posttrain.records import Example
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
from posttrain.training.optimizer import POLICY, OwnOptimizer, apply_gradients, new_optimizer, next_rate
from posttrain.training.sft.supervised import HeldOutLoss, accumulate


@dataclass(slots=True, kw_only=True)
class SftState:
    """What a supervised run remembers between steps, besides weights."""

    step: int = 0
    next_example: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    eval_loss: float | None = None
    """Held-out loss when last measured; a finished run measures it on its final weights."""
    best_eval_loss: float | None = None
    before: dict[str, object] = field(default_factory=dict)
    """What was measured before training, as summary.json has it."""
    after: dict[str, object] = field(default_factory=dict)
    """What was measured last."""

    def saw_evaluation(self, measured: HeldOutLoss) -> None:
        """Keep a measurement in mind; one before training is no result of it."""
        if not self.step:
            self.before = measured.summary()
            return
        self.after, self.eval_loss = measured.summary(), measured.loss
        best = self.best_eval_loss
        self.best_eval_loss = self.eval_loss if best is None else min(self.eval_loss, best)


class TrainedBySupervision:
    """A policy, its optimiser and the counters of its run."""

    def __init__(
        self, policy: Policy, options: SftOptions, *, seed: int = 0, optimizer: OwnOptimizer | None = None
    ) -> None:
        """The seed is for an adapter's dropout."""
        self.policy, self.options, self.run, self.seed = policy, options, SftState(), seed
        self.own_optimizer = optimizer
        self.optimizer: torch.optim.Optimizer = (
            new_optimizer(policy.model.parameters(), options) if optimizer is None else optimizer.optimizer
        )

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.run.step

    @property
    def seconds(self) -> float:
        """What they have taken, in all lives of the run."""
        return self.run.seconds

    def learn(self, batch: Sequence[Example], step: int, num_steps: int) -> dict[str, float]:
        """Take one optimiser step on a batch of examples; returns its metrics."""
        with adapter_dropout(self.policy.model, self.seed, step):
            metrics = accumulate(
                self.policy,
                batch,
                self.options.tokens_per_microbatch,
                measure_entropy=self.options.measure_entropy,
            )
        rate = next_rate(self.options, self.own_optimizer, step - 1, num_steps)
        grad_norm = apply_gradients(self.optimizer, rate, self.options.max_grad_norm)[POLICY]
        if not math.isfinite(grad_norm):
            raise RunError(f"loss {metrics['loss']}, gradient norm {grad_norm}; lower sft.learning_rate.")
        self.run.step = step
        self.run.next_example += len(batch)
        self.run.num_tokens += sum(len(example.tokens) for example in batch)
        return metrics | {"grad_norm": grad_norm, "learning_rate": rate, "num_tokens": float(self.run.num_tokens)}

    def tensors(self) -> Mapping[str, Tensors]:
        """All tensors that the next step reads."""
        return {"policy": module_tensors(self.policy.model), "optimizer": optimizer_tensors(self.optimizer)[0]}

    @cached_property
    def frozen(self) -> Mapping[str, object]:
        """What checkpoints say of the weights that they leave out; those never change."""
        return frozen_state(self.policy.model, self.policy.model.name_or_path or "a model object")

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
        restore_module(self.policy.model, saved.tensors["policy"])
        restore_optimizer(self.optimizer, saved.tensors["optimizer"], optimizer)
        self.run = SftState(**run)
