"""Low-rank adapters on the experts of a mixture, which are arrays of three dimensions and no linear layers.

    W'_e = W_e + s·B_e·A_e      for each expert e;  A [rank·experts inputs], B [outputs rank·experts]

As peft has it for `target_parameters`: one wrapper around the module for each of its arrays, the first array's
innermost.  The module runs with W' in place of W, so W' is made in every forward pass, and an update keeps it for its
backward pass.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from posttrain.errors import UserError
from posttrain.models.adapters.dropout import InputDropout
from posttrain.models.adapters.lora import LoraLinear, stream_seed
from posttrain.options.adapter import AdapterOptions


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
        """The module at the bottom."""
        return list(self.chain())[-1].base_layer

    def array(self) -> Float[Tensor, "experts rows columns"]:
        """W, as the module keeps it."""
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
