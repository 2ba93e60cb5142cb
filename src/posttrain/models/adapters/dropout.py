"""Dropout before an adapter: which features of a token it does not see, as a function of what the token is.

    m = [h(seed, update, layer, row, position, feature) ≥ p] / (1 - p)      y = W·x + b + s·B·(A·(m∘x))

h is a hash, uniform in [0, 1), of which nothing is remembered: the same token of the same row meets the same mask in
whatever micro-batch, order or padding it is computed, and when it is computed again.  A *row* is known by its tokens:
those of a prompt, which is one row however many completions continue it, or of a prompt and a completion together.
So two equal completions of a prompt meet one mask, and a prompt the same one in each of its completions.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from posttrain.errors import UserError

TILE_ELEMENTS = 1 << 17
"""Numbers whose masks a CPU makes at a time: half a MiB, which its cache keeps between the steps of the hash."""
CUDA_ELEMENTS = 1 << 26
"""The same on a GPU."""
STEP = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, odd: its multiples are spread evenly."""


@dataclass(frozen=True, slots=True)
class TokenDropout:
    """The masks of one layer's inputs in one update."""

    share: float
    """p, above 0 and below 1."""
    key: int
    """64 bits that are a function of seed, update and layer."""
    tokens: Int64[Tensor, " *rows"]
    """What `token_keys` says of the token in each row of the input."""

    def applied(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        """m∘x.  The gradient of x is m∘ that of the result; neither keeps the mask."""
        flat = x.reshape(-1, x.shape[-1])
        made = torch.empty_like(flat)
        rows = _high_half(_mixed(self.tokens.flatten() ^ self.key))
        features = _high_half(_mixed(torch.arange(flat.shape[1], device=x.device) * STEP + self.key))
        at_once = max(1, (CUDA_ELEMENTS if x.is_cuda else TILE_ELEMENTS) // flat.shape[1])
        for part, given, row in zip(made.split(at_once), flat.split(at_once), rows.split(at_once), strict=True):
            torch.mul(given, self._kept(row, features), out=part)
        return made.div_(1 - self.share).view(x.shape)

    def _kept(self, rows: Int32[Tensor, " row"], features: Int32[Tensor, " input"]) -> Bool[Tensor, "row input"]:
        """Which numbers are seen: the finaliser of MurmurHash3 but for its last step, which moves no high bit."""
        mixed = rows[:, None] ^ features
        mixed ^= (mixed >> 16) & 0xFFFF
        mixed *= 0x85EBCA6B - 2**32
        mixed ^= (mixed >> 13) & 0x7FFFF
        mixed *= 0xC2B2AE35 - 2**32
        return mixed >= min(round(self.share * 2**32), 2**32 - 1) - 2**31

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "TokenDropout":
        """For an input that has only some rows of this one."""
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


def dropped(x: Float[Tensor, "*rows inputs"], dropout: TokenDropout) -> Float[Tensor, "*rows inputs"]:
    made: Tensor = _Dropped.apply(x, dropout)  # type: ignore[no-untyped-call]
    return made


@dataclass(slots=True)
class InputDropout:
    """What an adapter over one layer does not see of the layer's input, inside an update alone."""

    share: float
    layer: str
    """The layer's name in the model."""
    option: str
    """What sets the share."""
    key: int | None = None
    """Which masks there are: a function of seed, layer and update.  None outside an update."""
    tokens: Tensor | None = None
    """The token in each row of the input (`token_keys`), as the forward pass in course has said."""

    def in_force(self, device: torch.device) -> TokenDropout | None:
        """The masks of an update's gradients; None for whatever else is computed."""
        if self.key is None or not torch.is_grad_enabled():
            return None
        assert self.tokens is not None, f"no forward pass has said which tokens {self.layer} reads"
        return TokenDropout(self.share, self.key, self.tokens.to(device))

    def applied(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        """The input with a share of it at zero and the rest 1/(1 - share) as large, inside an update alone."""
        dropout = self.in_force(x.device)
        if dropout is None:
            return x
        if x.shape[:-1] not in (dropout.tokens.shape, dropout.tokens.flatten().shape):
            raise UserError(
                f"{self.option}: {self.layer} does not read every token of every row once and in order (but"
                f" {[*x.shape]}), so what it drops would depend on micro-batches.  Leave dropout at 0, or leave that"
                " layer out of the adapter's targets."
            )
        return dropped(x, dropout)


class PeftDropout(nn.Dropout):
    """A dropout of peft's layers that drops by token in an update; elsewhere it is torch's."""

    def __init__(self, share: float, layer: str) -> None:
        super().__init__(share)
        self.input_dropout = InputDropout(share, layer, "lora_dropout")

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        seen: Tensor = super().forward(self.input_dropout.applied(x))
        return seen


@dataclass(frozen=True, slots=True)
class TokenKeys:
    """64 bits for each token that goes through a model: a function of its row's tokens and of its position."""

    prompts: list[Int64[Tensor, " _"]]
    completions: list[Int64[Tensor, " _"]]
    """Without the last token of each, which goes through no model."""

    def sequence(self, prompt: int, completion: int) -> Int64[Tensor, " token"]:
        """Those of a prompt and a completion."""
        return torch.cat([self.prompts[prompt], self.completions[completion]])


def token_keys(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int]
) -> TokenKeys:
    """The keys of prompts and of the completions that continue them."""
    return TokenKeys(
        [_keys(_row_key(prompt), 0, len(prompt)) for prompt in prompts],
        [
            _keys(_row_key(prompts[p], completion), len(prompts[p]), len(completion) - 1)
            for p, completion in zip(prompt_of, completions, strict=True)
        ],
    )


def _row_key(*parts: Sequence[int]) -> int:
    """64 bits, signed, for a row: its tokens, and how long each part is."""
    digest = hashlib.blake2b(np.asarray([len(part) for part in parts], dtype="<i8").tobytes(), digest_size=8)
    for part in parts:
        digest.update(np.asarray(part, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _keys(row: int, start: int, count: int) -> Int64[Tensor, " token"]:
    return _mixed(torch.arange(start, start + count) * STEP + row)


def _mixed(number: Int64[Tensor, " number"]) -> Int64[Tensor, " number"]:
    """The finaliser of SplitMix64: each bit of a number moves about half of those of the result."""
    number = (number ^ _shifted(number, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    number = (number ^ _shifted(number, 27)) * (0x94D049BB133111EB - 2**64)
    return number ^ _shifted(number, 31)


def _shifted(number: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in, as torch has no unsigned numbers."""
    shifted: Tensor = (number >> by) & (2 ** (64 - by) - 1)
    return shifted


def _high_half(number: Int64[Tensor, " number"]) -> Int32[Tensor, " number"]:
    return (number >> 32).to(torch.int32)
