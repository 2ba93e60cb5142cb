"""The two forward passes of sampling: prompts once each, then one token a row at a time.

`DecoderSteps` (`decoder_steps.py`) runs the decoder of the shared-prompt forward pass; `ModelSteps` (`model_steps.py`)
is plain, the model's own forward.  Both fill the same cache, in inference mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.generation.slots import KeyValueSlots


@dataclass(frozen=True, slots=True)
class PrefilledPrompts:
    """Prompts that went through the model once: what their completions start from."""

    logits: Float[Tensor, "prompt vocab"]
    cached: Float[Tensor, "two layer prompt kv_heads time width"]
    """Keys and values, padded on the right."""
    lengths: Int64[Tensor, " prompt"]


@runtime_checkable
class Steps(Protocol):
    """A model's forward pass, seen from the sampler."""

    def refresh(self) -> None:
        """Read the policy's weights anew; called before every rollout."""
        ...

    def release(self) -> None:
        """Let go of what only a rollout needs; called after it."""
        ...

    def slots(self) -> KeyValueSlots:
        """An empty cache for one rollout."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts."""
        ...

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row; logits of the next."""
        ...
