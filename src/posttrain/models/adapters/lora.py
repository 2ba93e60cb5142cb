"""Low-rank adapters in place of a model's linear layers.

    y = W·x + b + s·B·(A·x)      W, b frozen; A [rank inputs], B [outputs rank]

Hu et al. 2021, arXiv:2106.09685.  Sampler and trainer run through the same layers; nothing is ever merged into W.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.dropout import InputDropout
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
        self.input_dropout = InputDropout(options.dropout, name, "model.adapter.dropout")

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
        low = F.linear(self.input_dropout.applied(x.to(factors.down.dtype)), factors.down)
        return out + (F.linear(low, factors.up) * self.scale).to(out.dtype)


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
