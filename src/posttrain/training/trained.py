"""What a run trains and keeps between steps: weights, optimiser and counters, as saved in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from posttrain.models.policy import Policy
from posttrain.models.sharding import sharded_forward
from posttrain.runs import tensor_state
from posttrain.runs.checkpoint import Checkpoint
from posttrain.training.optimizer import POLICY, OwnOptimizer


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters and results of every run; plain data."""

    step: int = 0
    num_tokens: int = 0
    """Number of tokens that the policy read, prompts included."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage, including parts before a resume."""
    before: dict[str, object] = field(default_factory=dict)
    """Held-out results before training, as summary.json has them."""

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        for stage, value in seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + value

    def restore(self, saved: Mapping[str, object]) -> None:
        for name, value in saved.items():
            setattr(self, name, {"update": value} if name == "seconds" and isinstance(value, float) else value)


@dataclass(slots=True, kw_only=True)
class RunState(Counters):
    """Counters of an RL run."""

    num_updates: int = 0
    completion_tokens: int = 0
    sampled_tokens: int = 0
    """Number of completion tokens sampled in training, including groups that dynamic sampling replaced."""
    trained_tokens: int = 0
    best_accuracy: float | None = None
    evaluations_since_best: int = 0
    transcripts: list[list[str]] = field(default_factory=list)
    """[prompt, completion before training] of the problems shown side by side at the end."""
    recipe: str = ""
    """File or name of the recipe that the run was started with, if known."""

    def saw_evaluation(self, accuracy: float) -> None:
        if self.best_accuracy is None or accuracy > self.best_accuracy:
            self.best_accuracy, self.evaluations_since_best = accuracy, 0
        else:
            self.evaluations_since_best += 1


@dataclass(slots=True, kw_only=True)
class FitState(Counters):
    """Counters of a run on rows or pairs."""

    cursor: ClassVar[str]
    """The number of learned rows or pairs, where the next batch begins."""
    after: dict[str, object] = field(default_factory=dict)
    """The latest held-out results."""

    @property
    def first(self) -> int:
        found: int = getattr(self, self.cursor)
        return found

    def count(self, num_items: int, num_tokens: int) -> None:
        setattr(self, self.cursor, self.first + num_items)
        self.num_tokens += num_tokens

    def saw_evaluation(self, results: Mapping[str, object]) -> None:
        setattr(self, "after" if self.step else "before", dict(results))


class SavedPart(Protocol):
    """State of a run other than modules, optimiser and counters: tensors, and the rest as JSON."""

    def tensors(self) -> Mapping[str, tensor_state.Tensors]: ...

    def state(self) -> Mapping[str, object]: ...

    def restore(self, saved: Checkpoint) -> None:
        """Restore from a checkpoint, after the counters."""


State = TypeVar("State", bound=Counters, covariant=True)


class Trained(Generic[State]):
    """The modules that a run trains, their optimiser and the run's counters."""

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer | OwnOptimizer,
        run: State,
        *,
        parts: Sequence[SavedPart] = (),
        head: Mapping[str, nn.Module] | None = None,
        updates_per_step: int = 1,
    ) -> None:
        self.policy, self.run, self.parts, self.updates_per_step = policy, run, parts, updates_per_step
        self.own_optimizer = optimizer if isinstance(optimizer, OwnOptimizer) else None
        self.optimizer = optimizer.optimizer if isinstance(optimizer, OwnOptimizer) else optimizer
        self.modules: Mapping[str, nn.Module] = {POLICY: policy.model, **(head or {})}
        if sharded_forward(policy) is not None:
            _ = self.frozen  # now, when all ranks are here

    @property
    def step(self) -> int:
        return self.run.step

    @property
    def seconds(self) -> float:
        return sum(self.run.seconds.values())

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        self.run.add_seconds(seconds)

    @cached_property
    def frozen(self) -> Mapping[str, object]:
        """A digest of the frozen weights, which checkpoints do not contain."""
        return tensor_state.frozen_state(self.policy.model, self.policy.model.name_or_path or "a model object")

    def tensors(self) -> Mapping[str, tensor_state.Tensors]:
        found: dict[str, tensor_state.Tensors] = {
            name: tensor_state.module_tensors(module) for name, module in self.modules.items()
        }
        found["optimizer"] = tensor_state.optimizer_tensors(self.optimizer)[0]
        for part in self.parts:
            found |= part.tensors()
        return found

    def state(self) -> Mapping[str, object]:
        found = {"run": asdict(self.run), "optimizer": tensor_state.optimizer_tensors(self.optimizer)[1], **self.frozen}
        for part in self.parts:
            found |= part.state()
        return found

    def restore(self, saved: Checkpoint) -> None:
        """Restore everything from a checkpoint."""
        optimizer, run = saved.state["optimizer"], saved.state["run"]
        assert isinstance(optimizer, Mapping)
        assert isinstance(run, Mapping)
        tensor_state.require_same_frozen(self.frozen, saved.state)
        self.run.restore(run)
        for part in self.parts:
            part.restore(saved)
        if self.own_optimizer is not None:
            self.own_optimizer.advance(max(0, saved.step * self.updates_per_step - 1))
        for name, module in self.modules.items():
            tensor_state.restore_module(module, saved.tensors[name])
        tensor_state.restore_optimizer(self.optimizer, saved.tensors["optimizer"], optimizer)
