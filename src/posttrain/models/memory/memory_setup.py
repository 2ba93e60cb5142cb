"""What of a run decides its memory, beside the model's shape."""

from dataclasses import dataclass, replace
from typing import Literal

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetup:
    """How a model is held and trained, and how many tokens of it are in memory at one time."""

    weight_bytes: int = FLOAT32
    """Of a weight that is trained, and of its gradient and moments."""
    frozen_bytes: int = FLOAT32
    """Of a weight under an adapter, where it is not in 4 bits."""
    compute_bytes: int = FLOAT32
    """Of a number in matrix products and in the cache of keys and values."""
    adapter_rank: int | None = None
    """None trains all weights."""
    adapts_experts: bool = False
    """Whether the adapter is on the experts of a mixture too."""
    quantized: bool = False
    """Whether linear layers are in 4 bits (nf4)."""
    trained: int | None = None
    """How many weights are trained, where it is not all of them, or an adapter on all linear layers."""
    reference: bool = False
    """Whether there is a reference; with an adapter it is the same weights with the adapter off."""
    critic: bool = False
    """Whether there is a critic with a trunk of its own, a model of the policy's size."""
    value_head: Literal["none", "linear", "mlp"] = "none"
    """What expects the rewards, on that trunk or on the policy's."""
    reward_models: int = 0
    """Bytes of the weights of the reward models that live where the policy does."""
    teacher: int = 0
    """Bytes of the weights of another model that teaches this one."""
    recomputes: bool = False
    """Gradient checkpointing: a layer's activations are computed again in the backward pass."""
    shared_prompt: bool = True
    """Whether each prompt of a micro-batch is computed once, else once for each completion."""
    on_cuda: bool = False
    samples: bool = True
    """Whether the run samples here; a supervised one does not, nor one whose engine is elsewhere."""
    micro_batch_option: str = "update.tokens_per_microbatch"
    """What a recipe calls `tokens_per_microbatch`."""
    refused: tuple[str, ...] = ()
    """Options of other settings that save memory, which this recipe would refuse: they are not advised."""
    prompt_tokens: int = 256
    completion_tokens: int = 400
    """Where a completion is cut off: the plan takes all to be as long as that."""
    prompts_per_step: int = 32
    group_size: int = 8
    max_rows: int = 256
    tokens_per_microbatch: int = 16384

    @property
    def num_rows(self) -> int:
        """Completions that are decoded side by side."""
        return min(self.max_rows, self.prompts_per_step * self.group_size)

    @property
    def row_tokens(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt_tokens + self.completion_tokens

    def full_training(self) -> "MemorySetup":
        """The same run with all weights trained."""
        return replace(self, adapter_rank=None, adapts_experts=False, quantized=False, trained=None)

    def with_adapter(self, rank: int, *, quantized: bool = False) -> "MemorySetup":
        """The same run with an adapter over weights that are held in the type of matrix products, or in 4 bits."""
        trained = self.trained if rank == self.adapter_rank else None
        return replace(self, adapter_rank=rank, quantized=quantized, frozen_bytes=self.compute_bytes, trained=trained)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """The largest micro-batch of an update."""

    prompts: int
    completions: int

    def tokens(self, setup: MemorySetup) -> int:
        """Tokens that go through the model: those of a shared prompt once, else once for each completion."""
        prompts = self.prompts if setup.shared_prompt else self.completions
        return prompts * setup.prompt_tokens + self.completions * setup.completion_tokens


def largest_micro_batch(setup: MemorySetup) -> MicroBatchSize:
    """What `tokens_per_microbatch` allows, or all of a step where that is less.

    Groups that lost completions without an advantage fill it up, so it may hold parts of one group more than fit whole.
    """
    if not setup.shared_prompt:
        rows = max(1, min(setup.tokens_per_microbatch // setup.row_tokens, setup.prompts_per_step * setup.group_size))
        return MicroBatchSize(-(-rows // setup.group_size), rows)
    group_tokens = setup.prompt_tokens + setup.group_size * setup.completion_tokens
    prompts = min(-(-setup.tokens_per_microbatch // group_tokens), setup.prompts_per_step)
    fitting = (setup.tokens_per_microbatch - prompts * setup.prompt_tokens) // setup.completion_tokens
    return MicroBatchSize(prompts, max(1, min(fitting, prompts * setup.group_size)))
