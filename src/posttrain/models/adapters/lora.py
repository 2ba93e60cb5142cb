"""Low-rank adapters on linear layers, and on the experts of a mixture.

    y = W·x + b + s·B·(A·x)      W, b frozen; A [rank inputs], B [outputs rank]

Hu et al. 2021, arXiv:2106.09685.  Sampler and trainer run through the same layers; nothing is ever merged into W.

Experts are arrays of three dimensions and not linear layers:

    W'_e = W_e + s·B_e·A_e      for each expert e;  A [rank·experts inputs], B [outputs rank·experts]

As in peft's `target_parameters`, each array has a wrapper around the module, the first array's innermost.  The module
runs with W' instead of W.  Every forward pass makes W', and an update keeps it for its backward pass.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.dropout import InputDropout
from posttrain.options.model import AdapterOptions

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
        raise UserError(
            f"model.adapter.targets: the model reads the matrix of {self.name} itself instead of calling the layer, so"
            " an adapter would have no effect.  Name other layers."
        )

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
        raise UserError(
            f"model.adapter.targets: the model reads {self.name} itself instead of calling the experts, so an adapter"
            " would have no effect.  Remove experts from the targets."
        )

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
