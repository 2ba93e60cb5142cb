"""Low-rank adapters on linear layers, and on the experts of a mixture.

    y = W·x + b + s·B·(A·x)      W, b frozen; A [rank inputs], B [outputs rank]

Hu et al. 2021, arXiv:2106.09685.  Sampler and trainer run through the same layers; nothing is ever merged into W.

Experts are arrays of three dimensions and not linear layers:

    W'_e = W_e + s·B_e·A_e      for each expert e;  A [rank·experts inputs], B [outputs rank·experts]

As in peft's `target_parameters`, each array has a wrapper around the module, the first array's innermost.  The module
runs with W' in place of W: W' is made in every forward pass, and an update keeps it for its backward pass.
"""

import hashlib
from collections.abc import Iterable, Iterator
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
    assert isinstance(layer, nn.Linear), f"a {type(layer).__name__} is not a linear layer"
    return layer.out_features, layer.in_features


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by the name that the model has for them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


class LoraExperts(LoraLinear):
    """An experts' module, or one that has an adapter already, with an adapter on one of its arrays."""

    def __init__(self, base: nn.Module, name: str, parameter: str, options: AdapterOptions, *, seed: int) -> None:
        nn.Module.__init__(self)
        self.base_layer, self.parameter = base.requires_grad_(False), parameter
        self.name, self.options, self.scale = f"{name}.{parameter}", options, options.scale
        if isinstance(base, LoraExperts):  # a second array: the first one's adapter is trained too
            for each in base.chain():
                each.lora_A.requires_grad_(True)
                each.lora_B.requires_grad_(True)
        weight = self.array()
        self.num_experts, first, second = weight.shape
        self.inputs_first = bool(getattr(self.experts(), "is_transposed", False))
        outputs, inputs = (second, first) if self.inputs_first else (first, second)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        stream = torch.Generator().manual_seed(stream_seed(seed, "adapter", self.name))
        rows = options.rank * self.num_experts
        drawn = torch.rand(rows, inputs, generator=stream, dtype=torch.float64) * 2 - 1
        self.lora_A = nn.Parameter((drawn / inputs**0.5).to(weight.device, dtype))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rows, dtype=dtype, device=weight.device))
        self.off, self.stand_in = False, None
        self.input_dropout = InputDropout(options.dropout, self.name, "model.adapter.dropout")

    def chain(self) -> "Iterator[LoraExperts]":
        """This wrapper and those below it."""
        layer: nn.Module = self
        while isinstance(layer, LoraExperts):
            yield layer
            layer = layer.base_layer

    def experts(self) -> nn.Module:
        return list(self.chain())[-1].base_layer

    def array(self) -> Float[Tensor, "experts rows columns"]:
        return cast(Tensor, getattr(self.experts(), self.parameter))

    def change(self) -> Float[Tensor, "experts rows columns"]:
        """s·B·A of every expert, in the order that the module keeps W in."""
        factors = self.factors()
        assert factors is not None, "an adapter that is off changes nothing"
        down = factors.down.reshape(self.num_experts, -1, factors.down.shape[1])
        up = factors.up.reshape(factors.up.shape[0], -1, self.num_experts)
        return torch.einsum("ore,eri->eio" if self.inputs_first else "ore,eri->eoi", up, down) * self.scale

    def forward(self, *given: Any, **named: Any) -> Any:
        """What the experts give with W + s·B·A, added in the adapter's type."""
        changed = {}
        for each in self.chain():
            if each.factors() is not None:
                change = each.change()
                changed[each.parameter] = each.array().to(change.dtype) + change
        return functional_call(self.experts(), changed, given, named)

    @property
    def weight(self) -> Tensor:
        """Refused, as any array that has an adapter."""
        raise UserError(
            f"model.adapter.targets: the model reads {self.name} itself instead of calling the experts, so an adapter"
            " there would have no effect.  Leave experts out of the targets."
        )

    def __getattr__(self, name: str) -> Any:
        """Whatever else the model asks its experts for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if any(name == each.parameter for each in self.chain()):
                return self.weight
            return getattr(self.experts(), name)


def wrap_experts(model: nn.Module, name: str, options: AdapterOptions, *, seed: int) -> LoraExperts:
    """Put an adapter on an array of experts, by the name that it has without any."""
    path, _, parameter = name.rpartition(".")
    above, _, last = path.rpartition(".")
    made = LoraExperts(model.get_submodule(path), path, parameter, options, seed=seed)
    setattr(model.get_submodule(above), last, made)
    return made


def without_wrappers(name: str) -> str:
    """A name as it is in a model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def wrapper_names(arrays: Iterable[str]) -> dict[str, str]:
    """The wrapper of each array, by the name of its module once all are wrapped: the last array's is outermost."""
    by_module: dict[str, list[str]] = {}
    for array in arrays:
        by_module.setdefault(array.rpartition(".")[0], []).append(array)
    return {
        array: path + ".base_layer" * (len(of_module) - 1 - place)
        for path, of_module in by_module.items()
        for place, array in enumerate(of_module)
    }
