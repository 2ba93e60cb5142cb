"""Low-rank adapters on linear layers, and on the experts of a mixture, and their dropout.

    y = W·x + b + s·B·(A·(m∘x))      W, b frozen; A [rank inputs], B [outputs rank]; m: dropout in updates, else 1

Hu et al. 2021, arXiv:2106.09685.  Sampler and trainer run through the same layers; nothing is ever merged into W.

Experts are arrays of three dimensions and not linear layers:

    W'_e = W_e + s·B_e·A_e      for each expert e;  A [rank·experts inputs], B [outputs rank·experts]

As in peft's `target_parameters`, each array has a wrapper around the module, the first array's innermost.  The module
runs with W' instead of W.  Every forward pass makes W', and an update keeps it for its backward pass.

Dropout hides features of a token from an adapter, as a function of the token:

    m = [h(seed, update, layer, row, position, feature) ≥ p] / (1 - p)

h is a stateless hash, uniform in [0, 1): the same token of the same row gets the same mask in every micro-batch, order
and padding, and when it is computed again.  A *row* is identified by its tokens: those of a prompt, which is one row
however many completions continue it, or of a prompt and a completion together.  So equal completions of a prompt have
the same mask, and a prompt has one mask for all its completions.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.options.model import AdapterOptions

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
            # MurmurHash3's finaliser but for its last step, which changes no high bit.
            mixed = row[:, None] ^ features
            mixed ^= (mixed >> 16) & 0xFFFF
            mixed *= 0x85EBCA6B - 2**32
            mixed ^= (mixed >> 13) & 0x7FFFF
            mixed *= 0xC2B2AE35 - 2**32
            torch.mul(given, mixed >= min(round(self.share * 2**32), 2**32 - 1) - 2**31, out=part)
        return made.div_(1 - self.share).view(x.shape)

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


DOWN, UP = "lora_A", "lora_B"
"""Names of the two matrices, as in peft's files."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The two matrices of a layer's adapter."""

    down: Float[Tensor, "rank inputs"]
    """A."""
    up: Float[Tensor, "outputs rank"]
    """B."""


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank adapter, in float32 whatever the layer's type.

    A is drawn as peft draws it, uniform within ±1/√inputs, from a stream of seed and name: another target changes no
    other layer's draw.  B is zero, so training starts from the unchanged model.
    """

    def __init__(self, base: nn.Module, name: str, options: AdapterOptions, *, seed: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        outputs, inputs = layer_shape(base)
        self.put_adapter(name, options, seed, next(base.parameters()), (options.rank, inputs), (outputs, options.rank))

    def put_adapter(
        self, name: str, options: AdapterOptions, seed: int, like: Tensor, down: tuple[int, int], up: tuple[int, int]
    ) -> None:
        """Draw A and B of these shapes, on the device of `like`; float64 if that is, so that float64 tests float32."""
        self.name, self.options, self.scale = name, options, options.scale
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        stream = torch.Generator().manual_seed(stream_seed(seed, "adapter", name))
        drawn = torch.rand(down, generator=stream, dtype=torch.float64) * 2 - 1
        self.lora_A = nn.Parameter((drawn / down[1] ** 0.5).to(like.device, dtype))
        self.lora_B = nn.Parameter(torch.zeros(up, dtype=dtype, device=like.device))
        self.off = False
        """Whether the layer behaves as if it had no adapter."""
        self.stand_in: Factors | None = None
        """Matrices in force instead of its own."""
        self.input_dropout = InputDropout(options.dropout, name, "model.adapter.dropout")

    @property
    def weight(self) -> Tensor:
        """Refused: code that reads a layer's matrix would ignore the adapter."""
        fault = f"the model reads the matrix of {self.name} itself instead of calling the layer"
        raise UserError(f"model.adapter.targets: {fault}, so an adapter would have no effect.  Name other layers.")

    def factors(self) -> Factors | None:
        """The matrices in force; None if the adapter is off."""
        return None if self.off else self.stand_in or Factors(self.lora_A, self.lora_B)

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        out: Tensor = self.base_layer(x)
        factors = self.factors()
        if factors is None:
            return out
        low = F.linear(self.input_dropout.applied(x.to(factors.down.dtype)), factors.down)
        return out + (F.linear(low, factors.up) * self.scale).to(out.dtype)


def stream_seed(seed: int, *key: object) -> int:
    """A seed for one purpose, a function of `seed` and `key`."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:8], "big") >> 1


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer; GPT-2's are stored transposed, and 4-bit ones packed."""
    if isinstance(layer, Conv1D):
        inputs, outputs = layer.weight.shape
        return outputs, inputs
    assert isinstance(layer, nn.Linear), f"a {type(layer).__name__} is not a linear layer"
    return layer.out_features, layer.in_features


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


class LoraExperts(LoraLinear):
    """An experts' module, possibly with an adapter already, with an adapter on one of its arrays."""

    def __init__(self, base: nn.Module, name: str, parameter: str, options: AdapterOptions, *, seed: int) -> None:
        nn.Module.__init__(self)
        self.base_layer, self.parameter = base.requires_grad_(False), parameter
        if isinstance(base, LoraExperts):  # a second array: the first one's adapter is also trained
            for each in base.chain():
                each.lora_A.requires_grad_(True)
                each.lora_B.requires_grad_(True)
        weight = self.array()
        self.num_experts, first, second = weight.shape
        self.inputs_first = bool(getattr(self.experts(), "is_transposed", False))
        outputs, inputs = (second, first) if self.inputs_first else (first, second)
        rows = options.rank * self.num_experts
        self.put_adapter(f"{name}.{parameter}", options, seed, weight, (rows, inputs), (outputs, rows))

    def chain(self) -> "Iterator[LoraExperts]":
        layer: nn.Module = self
        while isinstance(layer, LoraExperts):
            yield layer
            layer = layer.base_layer

    def experts(self) -> nn.Module:
        return list(self.chain())[-1].base_layer

    def array(self) -> Float[Tensor, "experts rows columns"]:
        return cast(Tensor, getattr(self.experts(), self.parameter))

    def change(self) -> Float[Tensor, "experts rows columns"]:
        """s·B·A of every expert, in the layout of W."""
        factors = self.factors()
        assert factors is not None, "an adapter that is off changes nothing"
        down = factors.down.reshape(self.num_experts, -1, factors.down.shape[1])
        up = factors.up.reshape(factors.up.shape[0], -1, self.num_experts)
        return torch.einsum("ore,eri->eio" if self.inputs_first else "ore,eri->eoi", up, down) * self.scale

    def forward(self, *given: Any, **named: Any) -> Any:
        """The experts' result with W + s·B·A, added in the adapter's type."""
        changed = {}
        for each in self.chain():
            if each.factors() is not None:
                change = each.change()
                changed[each.parameter] = each.array().to(change.dtype) + change
        return functional_call(self.experts(), changed, given, named)

    @property
    def weight(self) -> Tensor:
        fault = f"the model reads {self.name} itself instead of calling the experts, so an adapter would have no effect"
        raise UserError(f"model.adapter.targets: {fault}.  Remove experts from the targets.")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if any(name == each.parameter for each in self.chain()):
                return self.weight
            return getattr(self.experts(), name)


def wrap_experts(model: nn.Module, name: str, options: AdapterOptions, *, seed: int) -> LoraExperts:
    """Put an adapter on an array of experts, given by its name without adapters."""
    path, _, parameter = name.rpartition(".")
    made = LoraExperts(model.get_submodule(path), path, parameter, options, seed=seed)
    put_layer(model, path, made)
    return made


def put_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, layer)


def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")
