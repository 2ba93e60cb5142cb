"""A model's forward pass as the sampler sees it: prompts are prefilled, then rows advance one token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.generation.request import Request
from posttrain.models.native.native_decoder import DrawnTokens, DrawRequest

BLOCK = 64
"""Room in a cache is made for this many tokens a row at a time."""


Prompts = Int64[Tensor, " row"] | None
"""The prompt that each new row begins with, by its place among cached ones; None is all of them in order."""


@dataclass(frozen=True, slots=True)
class PrefilledPrompts:
    """Prefilled prompts, from which completions start."""

    logits: Float[Tensor, "prompt vocab"]
    cached: Sequence[Tensor]
    """The cache, one row a prompt, padded on the right; `Slots` knows its tensors."""
    lengths: Int64[Tensor, " prompt"]
    """Tokens of each prompt, on the CPU."""


@runtime_checkable
class Slots(Protocol):
    """The cache of the rows being decoded; rows come and go, the others stay in place.

    Lengths and places of rows are given on the CPU, which knows them all: a GPU is never asked for them.
    """

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"], prompts: Prompts = None) -> None:
        """Append rows of `lengths` tokens, each from the cache of one of the prompts; later columns are padding."""

    def row(self, row: int) -> list[Tensor]:
        """A copy of one row, as `add` takes it."""

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        """Copy rows over finished ones and drop all after `num_left`."""


@runtime_checkable
class Steps(Protocol):
    """A model's forward pass, seen from the sampler; `prefill` and `step` are called in inference mode."""

    def refresh(self) -> None:
        """Read the policy's weights again; called before every sampling."""
        return

    def release(self) -> None:
        """Free what only a sampling needs; called after it."""
        return

    def slots(self) -> Slots:
        """An empty cache for one sampling."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts."""

    def step(self, tokens: Int64[Tensor, " row"], slots: Any) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row; logits of the next."""


@runtime_checkable
class DrawingSteps(Protocol):
    """Steps that can also draw: several tokens of each row in one call."""

    def draws(self, request: Request) -> bool:
        """Whether `draw` can serve the request; else tokens are drawn one by one from the logits of `step`."""

    def num_steps(self, num_rows: int) -> int:
        """How many tokens of each row to draw in one call."""

    def draw(self, tokens: Int64[Tensor, " row"], slots: Any, request: DrawRequest) -> DrawnTokens:
        """Run a token of each row and draw the next, as often as there are uniform numbers or until the row ends."""
