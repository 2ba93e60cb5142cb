"""Low-rank adapters in place of a model's linear layers.

    y = W·x + b + s·B·(A·x)      W, b frozen; A [rank inputs], B [outputs rank]

Hu et al. 2021, arXiv:2106.09685.  Sampler and trainer run through the same layers; nothing is ever merged into W.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.dropout import TokenDropout, dropped
from posttrain.options.adapter import AdapterOptions

DOWN, UP = "lora_A", "lora_B"
"""What the two matrices are called, as in peft's files."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The two matrices of a layer's adapter."""

    down: Float[Tensor, "rank inputs"]
    """A."""
    up: Float[Tensor, "outputs rank"]
    """B."""


class LoraLinear(nn.Module):
    """A frozen linear layer and a low-rank adapter beside it, in float32 whatever the layer is kept in.

    A is drawn as peft draws it, uniform within ±1/√inputs, from a stream of its own that seed and name decide: another
    target changes no other layer's draw.  B is zero, so that training starts from the model as it is.
    """

    def __init__(self, base: nn.Module, name: str, options: AdapterOptions, *, seed: int) -> None:
        super().__init__()
        outputs, inputs = layer_shape(base)
        weight = next(base.parameters())
        # Double only where the model is, so that float64 tests what float32 does.
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        stream = torch.Generator().manual_seed(stream_seed(seed, "adapter", name))
        drawn = torch.rand(options.rank, inputs, generator=stream, dtype=torch.float64) * 2 - 1
        self.base_layer = base.requires_grad_(False)
        self.name, self.options, self.scale = name, options, options.scale
        self.lora_A = nn.Parameter((drawn / inputs**0.5).to(weight.device, dtype))
        self.lora_B = nn.Parameter(torch.zeros(outputs, options.rank, dtype=dtype, device=weight.device))
        self.off = False
        """Whether the layer is as if it had no adapter."""
        self.stand_in: Factors | None = None
        """Matrices in force in place of its own."""
        self.dropout_key: int | None = None
        """Which masks its dropout has: a function of seed, layer and update.  None outside an update."""
        self.tokens: Tensor | None = None
        """The token in each row of its input (`dropout.token_keys`), as the forward pass in course has said."""

    @property
    def weight(self) -> Tensor:
        """Refused: code that reads a layer's matrix by name leaves out the adapter."""
        raise UserError(
            f"model.adapter.targets: the model reads the matrix of {self.name} itself instead of calling the layer, so"
            " an adapter there would have no effect.  Name other layers."
        )

    def factors(self) -> Factors | None:
        """The matrices in force; None where the adapter is off."""
        return None if self.off else self.stand_in or Factors(self.lora_A, self.lora_B)

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """The equation above."""
        out: Tensor = self.base_layer(x)
        factors = self.factors()
        if factors is None:
            return out
        low = F.linear(self.dropped(x.to(factors.down.dtype)), factors.down)
        return out + (F.linear(low, factors.up) * self.scale).to(out.dtype)

    def dropout(self) -> TokenDropout | None:
        """The masks in force: those of an update's gradients, and None for whatever else is computed."""
        if self.dropout_key is None or not torch.is_grad_enabled():
            return None
        assert self.tokens is not None, f"no forward pass has said which tokens {self.name} reads"
        return TokenDropout(self.options.dropout, self.dropout_key, self.tokens)

    def dropped(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows inputs"]:
        """The inputs with a share of them at zero and the others 1/(1 - share) as large, inside an update alone."""
        dropout = self.dropout()
        if dropout is None:
            return x
        if x.shape[:-1] not in (dropout.tokens.shape, dropout.tokens.flatten().shape):
            raise UserError(
                f"model.adapter.dropout: {self.name} does not read every token of every row once and in order (but"
                f" {[*x.shape]}), so what it drops would depend on micro-batches.  Leave dropout at 0, or leave that"
                " layer out of model.adapter.targets."
            )
        return dropped(x, dropout)


def stream_seed(seed: int, *key: object) -> int:
    """A seed that is a function of a seed and of what it is for."""
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:8], "big") >> 1


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer; GPT-2's keep their matrix transposed, and 4-bit ones in pieces."""
    if isinstance(layer, Conv1D):
        inputs, outputs = layer.weight.shape
        return outputs, inputs
    assert isinstance(layer, nn.Linear), f"a {type(layer).__name__} is no linear layer"
    return layer.out_features, layer.in_features


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by the name that the model has for them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def dropping_layers(model: nn.Module) -> list[LoraLinear]:
    """The layers whose adapter has a dropout."""
    return [layer for layer in lora_layers(model).values() if layer.options.dropout > 0]


def in_update(dropping: Sequence[LoraLinear]) -> bool:
    """Whether such layers drop inputs now: inside `adapter_dropout`, and where there is to be a gradient."""
    return torch.is_grad_enabled() and any(layer.dropout_key is not None for layer in dropping)


def name_tokens(dropping: Sequence[LoraLinear], keys: Int64[Tensor, " *rows"]) -> None:
    """Say which token is in each row of what such layers will read, until the next forward pass says so."""
    for layer in dropping:
        layer.tokens = keys.to(layer.lora_A.device)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, adapters drop nothing, also where gradients are taken with their dropout."""
    layers = list(lora_layers(model).values())
    before = [layer.dropout_key for layer in layers]
    for layer in layers:
        layer.dropout_key = None
    try:
        yield
    finally:
        for layer, key in zip(layers, before, strict=True):
            layer.dropout_key = key


def drops(model: nn.Module) -> bool:
    """Whether updates compute something else than sampling does, because adapters drop inputs."""
    return bool(dropping_layers(model))


@contextmanager
def adapter_dropout(model: nn.Module, seed: int, update: int) -> Iterator[None]:
    """Inside, gradients are taken with the adapter's dropout; its masks are those of `adapters.dropout`."""
    layers = dropping_layers(model)
    for layer in layers:
        layer.dropout_key = stream_seed(seed, "dropout", layer.name, update)
    try:
        yield
    finally:
        for layer in layers:
            layer.dropout_key = layer.tokens = None
