"""Dropout before an adapter: the features of a token that it does not see, as a function of the token.

    m = [h(seed, update, layer, row, position, feature) ≥ p] / (1 - p)      y = W·x + b + s·B·(A·(m∘x))

h is a stateless hash, uniform in [0, 1): the same token of the same row gets the same mask in every micro-batch, order
and padding, and when it is computed again.  A *row* is identified by its tokens: those of a prompt, which is one row
however many completions continue it, or of a prompt and a completion together.  So equal completions of a prompt have
the same mask, and a prompt has one mask for all its completions.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from posttrain.errors import UserError

TILE_ELEMENTS = 1 << 17
"""Numbers whose masks a CPU makes at a time: half a MiB, which stays in its cache between the steps of the hash."""
CUDA_ELEMENTS = 1 << 26
"""The same on a GPU."""
STEP = 0x9E3779B97F4A7C15 - 2**64
"""2^64 / golden ratio, odd: its multiples are spread evenly."""


@dataclass(frozen=True, slots=True)
class TokenDropout:
    """The masks of one layer's inputs in one update."""

    share: float
    """p, above 0 and below 1."""
    key: int
    """64 bits, a function of seed, update and layer."""
    tokens: Int64[Tensor, " *rows"]
    """`token_keys` of the token in each row of the input."""

    def applied(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        """m∘x.  The gradient of x is m∘ the result's; the mask is never stored."""
        flat = x.reshape(-1, x.shape[-1])
        made = torch.empty_like(flat)
        rows = (_mixed(self.tokens.flatten() ^ self.key) >> 32).to(torch.int32)
        features = (_mixed(torch.arange(flat.shape[1], device=x.device) * STEP + self.key) >> 32).to(torch.int32)
        at_once = max(1, (CUDA_ELEMENTS if x.is_cuda else TILE_ELEMENTS) // flat.shape[1])
        for part, given, row in zip(made.split(at_once), flat.split(at_once), rows.split(at_once), strict=True):
            torch.mul(given, self._kept(row, features), out=part)
        return made.div_(1 - self.share).view(x.shape)

    def _kept(self, rows: Int32[Tensor, " row"], features: Int32[Tensor, " input"]) -> Bool[Tensor, "row input"]:
        """Which numbers are seen: the finaliser of MurmurHash3 without its last step, which changes no high bit."""
        mixed = rows[:, None] ^ features
        mixed ^= (mixed >> 16) & 0xFFFF
        mixed *= 0x85EBCA6B - 2**32
        mixed ^= (mixed >> 13) & 0x7FFFF
        mixed *= 0xC2B2AE35 - 2**32
        return mixed >= min(round(self.share * 2**32), 2**32 - 1) - 2**31

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "TokenDropout":
        return replace(self, tokens=self.tokens[rows])


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dropout: TokenDropout) -> Tensor:
        ctx.dropout = dropout  # type: ignore[attr-defined]
        return dropout.applied(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        dropout: TokenDropout = ctx.dropout  # type: ignore[attr-defined]
        return dropout.applied(grad), None


@dataclass(slots=True)
class InputDropout:
    """The dropout of one layer's adapter, which acts only in updates."""

    share: float
    layer: str
    option: str
    """The option that sets the share, for messages."""
    key: int | None = None
    """`TokenDropout.key`; None outside an update."""
    tokens: Tensor | None = None
    """The token in each row of the input (`token_keys`), set by the forward pass."""

    def in_force(self, device: torch.device) -> TokenDropout | None:
        """The masks, if gradients of an update are computed."""
        if self.key is None or not torch.is_grad_enabled():
            return None
        assert self.tokens is not None, f"no forward pass has said which tokens {self.layer} reads"
        return TokenDropout(self.share, self.key, self.tokens.to(device))

    def applied(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        """The input; in updates with a share of it at zero and the rest divided by 1 - share."""
        dropout = self.in_force(x.device)
        if dropout is None:
            return x
        if x.shape[:-1] not in (dropout.tokens.shape, dropout.tokens.flatten().shape):
            raise UserError(
                f"{self.option}: {self.layer} does not read each token once and in order (but {[*x.shape]}), so masks"
                " would depend on micro-batches.  Leave dropout at 0, or remove that layer from the targets."
            )
        return cast(Tensor, _Dropped.apply(x, dropout))  # type: ignore[no-untyped-call]


class PeftDropout(nn.Dropout):
    """Dropout of a peft layer: by token in an update, elsewhere torch's."""

    def __init__(self, share: float, layer: str) -> None:
        super().__init__(share)
        self.input_dropout = InputDropout(share, layer, "lora_dropout")

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        seen: Tensor = super().forward(self.input_dropout.applied(x))
        return seen


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """64 bits for each token that goes through a model, a function of its row's tokens and its position."""

    prompts: list[Int64[Tensor, " _"]]
    completions: list[Int64[Tensor, " _"]]
    """Without the last token of each, which does not go through the model."""

    def sequences(self, prompt_of: Sequence[int]) -> list[Int64[Tensor, " _"]]:
        return [torch.cat([self.prompts[p], keys]) for p, keys in zip(prompt_of, self.completions, strict=True)]


def token_keys(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int]
) -> TokenKeys:
    """Hashes of the row's tokens, the length of its parts and each position."""

    def keys(parts: Sequence[Sequence[int]], start: int, count: int) -> Tensor:
        digest = hashlib.blake2b(np.asarray([len(part) for part in parts], dtype="<i8").tobytes(), digest_size=8)
        for part in parts:
            digest.update(np.asarray(part, dtype="<i8").tobytes())
        row = int.from_bytes(digest.digest(), "little", signed=True)
        return _mixed(torch.arange(start, start + count) * STEP + row)

    pairs = [(prompts[p], completion) for p, completion in zip(prompt_of, completions, strict=True)]
    return TokenKeys(
        [keys([prompt], 0, len(prompt)) for prompt in prompts],
        [keys([prompt, completion], len(prompt), len(completion) - 1) for prompt, completion in pairs],
    )


def _mixed(number: Int64[Tensor, " number"]) -> Int64[Tensor, " number"]:
    """The finaliser of SplitMix64: each bit of a number changes about half of the result's."""
    number = (number ^ _shifted(number, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    number = (number ^ _shifted(number, 27)) * (0x94D049BB133111EB - 2**64)
    return number ^ _shifted(number, 31)


def _shifted(number: Tensor, by: int) -> Tensor:
    """Logical shift to the right: torch has no unsigned numbers."""
    shifted: Tensor = (number >> by) & (2 ** (64 - by) - 1)
    return shifted
