"""The forward passes of sampling: prompts once each, then one token a row at a time.

`DecoderSteps` (`decoder_steps.py`) runs the decoder of the shared-prompt forward pass; `ModelSteps`
(`model_steps.py`) the model's own forward with its cache, and `RecomputedSteps` (`recomputed_steps.py`) the
same without one.  All run in inference mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefilledPrompts:
    """Prefilled prompts, from which completions start."""

    logits: Float[Tensor, "prompt vocab"]
    cached: Sequence[Tensor]
    """The cache, one row a prompt, padded on the right; `Slots` knows its tensors."""
    lengths: Int64[Tensor, " prompt"]


@runtime_checkable
class Slots(Protocol):
    """The cache of the rows being decoded; rows come and go, the others stay in place."""

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"]) -> None:
        """Append rows of `lengths` tokens from the cache of prompts; later columns are padding."""

    def row(self, row: int) -> tuple[list[Tensor], int]:
        """A copy of one row, as `add` takes it, and the tokens that it holds."""

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        """Copy rows over finished ones and drop all behind `num_left`."""


S = TypeVar("S", bound=Slots)


@runtime_checkable
class Steps(Protocol[S]):
    """A model's forward pass, seen from the sampler."""

    def refresh(self) -> None:
        """Read the policy's weights anew; called before every sampling."""

    def release(self) -> None:
        """Free what only a sampling needs; called after it."""

    def slots(self) -> S:
        """An empty cache for one sampling."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts."""

    def step(self, tokens: Int64[Tensor, " row"], slots: S) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row; logits of the next."""
