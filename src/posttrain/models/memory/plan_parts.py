"""The parts of a memory plan, and what several ranks hold in addition: weights that are whole for some time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from posttrain.models.memory import memory_parts
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.model_shape import ModelShape

FILE_BYTES, MOST_FILES = 2**27, 64
"""Whole tensors of this size, or of a 64th of all, are in one file of each rank's part of a checkpoint: torch copies a
file's tensors to write it."""


def gathered_to_sample(shape: ModelShape, setup: MemorySetup) -> int:
    """The whole weights, from which each of several ranks samples its share."""
    return 0 if setup.ranks == 1 else memory_parts.weights(shape, setup)


def gathered_to_update(shape: ModelShape, setup: MemorySetup) -> int:
    """Of several ranks: one layer and what is in none, whole, with their gradients: 2 b · (N_layer + N_rest).

    Under an adapter the gradient of what is frozen is missing.  On a CPU malloc keeps what layers have freed, so that
    all count: 2 b · N.
    """
    if setup.ranks == 1:
        return 0
    if not setup.on_cuda:
        return memory_parts.weights(shape, setup) + memory_parts.gradients(shape, setup)
    layer = (shape.linear_parameters + shape.expert_parameters) // shape.layers
    rest = shape.parameters - layer * shape.layers
    return (1 if setup.adapter_rank is not None else 2) * setup.weight_bytes * (layer + rest)


def copied_to_save(shape: ModelShape, setup: MemorySetup) -> int:
    """Copies of a rank's parts while a file of its checkpoint is written: 2 · (trained weights and moments) / files."""
    trained = memory_parts.gradients(shape, setup) + memory_parts.optimizer(shape, setup)
    return 0 if setup.ranks == 1 else 2 * trained // min(MOST_FILES, 1 + trained // FILE_BYTES)


@dataclass(frozen=True, slots=True)
class PlanPart:
    """One row of a plan."""

    name: str
    words: str
    phase: Literal["loading", "always", "sampling", "updating"]
    """When it is held; parts of sampling and of updating are never held at the same time."""
    bytes: Callable[[ModelShape, MemorySetup], int]
    stays: bool = False
    """Whether it is held always by captured steps on a GPU, at one address, and by steps that are collected ahead."""
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
    PlanPart("copied", "copies for a checkpoint", "updating", copied_to_save, split=True),
    PlanPart("activations", "activations", "updating", memory_parts.activations),
    PlanPart("logits", "logits", "updating", memory_parts.trained_logits),
    PlanPart("copies", "matrix copies", "updating", memory_parts.update_copies),
)
