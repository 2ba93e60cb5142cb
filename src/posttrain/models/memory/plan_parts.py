"""The parts of a memory plan, and what several ranks hold in addition: weights that are whole for some time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posttrain.models.memory import memory_parts
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.model_shape import ModelShape


def gathered_to_sample(shape: ModelShape, setup: MemorySetup) -> int:
    """The whole weights, from which each of several ranks samples its share."""
    return 0 if setup.ranks == 1 else memory_parts.weights(shape, setup)


def gathered_to_update(shape: ModelShape, setup: MemorySetup) -> int:
    """With several ranks: a layer and the next one, whole and as they are sent, and the weights outside layers.

    2 b · (2 N_layer + N_rest)     with gradients; half of it under an adapter, whose base has no gradient
    """
    if setup.ranks == 1:
        return 0
    layer = (shape.linear_parameters + shape.expert_parameters) // shape.layers
    rest = shape.parameters - layer * shape.layers
    return (1 if setup.adapter_rank is not None else 2) * setup.weight_bytes * (2 * layer + rest)


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One row of a plan."""

    name: str
    words: str
    phase: Literal["loading", "always", "sampling", "updating"]
    """When it is held; parts of sampling and of updating are never held at the same time."""
    bytes: Callable[[ModelShape, MemorySetup], int]
    stays: bool = False
    """Whether captured steps on a GPU always hold it, at one address, and so do steps that are collected ahead."""
    split: bool = False
    """Whether each of several ranks has a part of it."""

    def held(self, shape: ModelShape, setup: MemorySetup) -> int:
        """Bytes of it in one process."""
        size = self.bytes(shape, setup)
        return -(-size // setup.ranks) if self.split else size


PARTS = (
    PlanPart("as_loaded", "weights as loaded", "loading", memory_parts.bytes_while_loading),
    PlanPart("weights", "weights", "always", memory_parts.weights, split=True),
    PlanPart("optimizer", "optimiser", "always", memory_parts.optimizer, split=True),
    PlanPart("reference", "reference", "always", memory_parts.reference, split=True),
    PlanPart("critic", "critic", "always", memory_parts.critic_bytes, split=True),
    PlanPart("reward_models", "reward models", "always", lambda shape, setup: setup.reward_models),
    PlanPart("teacher", "teacher", "always", lambda shape, setup: setup.teacher, split=True),
    PlanPart("gathered", "whole weights", "sampling", gathered_to_sample),
    PlanPart("key_value_cache", "K/V cache", "sampling", memory_parts.key_value_cache, stays=True),
    PlanPart("evaluation_cache", "K/V cache of an evaluation", "sampling", memory_parts.evaluation_cache),
    PlanPart("cache_growth", "K/V cache growing", "sampling", memory_parts.cache_growth),
    PlanPart("logits", "logits", "sampling", memory_parts.sampled_logits),
    PlanPart("copies", "matrix copies", "sampling", memory_parts.sampler_copies, stays=True),
    PlanPart("gradients", "gradients", "updating", memory_parts.gradients, split=True),
    PlanPart("gathered", "whole weights", "updating", gathered_to_update),
    PlanPart("activations", "activations", "updating", memory_parts.activations),
    PlanPart("logits", "logits", "updating", memory_parts.trained_logits),
    PlanPart("copies", "matrix copies", "updating", memory_parts.update_copies),
)
