"""Linear layers with an adapter as the decoder uses them: the frozen base's product plus thin ones.

    y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ

The base is read in place, dense or in 4 bits: nothing is joined, and only x·Aᵀ is kept for the backward pass.  Layers
that read one input share one product for their A, unless dropout shows each a different part of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.pytorch_utils import Conv1D

from posttrain.models.adapters.dropout import TokenDropout
from posttrain.models.adapters.lora import Factors, layer_shape
from posttrain.models.adapters.peft_layers import AdaptedLayer, adapted_layer
from posttrain.models.adapters.quantized import dequantized, is_4_bit, runs_packed
from posttrain.models.shared_prompt.linear import Matrix, Weight, dense_projection, for_inference, linear, weight_of


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """A frozen layer's matrix: dense in the type of the products, or in 4 bits and dense during a product."""

    layer: nn.Linear | Conv1D
    dtype: torch.dtype
    packed: Matrix | None = None
    """The matrix in inference's fastest order, if it was packed."""

    def matrix(self) -> Matrix:
        if self.packed is not None:
            return self.packed
        weight = dequantized(self.layer) if is_4_bit(self.layer) else weight_of(self.layer)
        return weight.detach().to(self.dtype)

    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.layer.bias.detach().to(self.dtype)

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        if runs_packed(self.layer):
            out: Tensor = self.layer(x)
            return out
        return linear(x, self.matrix(), self.bias())

    def product_back(self, grad: Float[Tensor, "row outputs"]) -> Float[Tensor, "row inputs"]:
        matrix = self.matrix()
        assert isinstance(matrix, Tensor), "packed for inference"
        return grad @ matrix


@dataclass(frozen=True, slots=True)
class AdaptedParts:
    """The layers' parts without gradient."""

    bases: tuple[FrozenBase, ...]
    outputs: tuple[int, ...]
    scales: tuple[float, ...]
    """s of each layer; 0 without an adapter."""
    dropouts: tuple[TokenDropout | None, ...]

    @property
    def drop(self) -> bool:
        return any(dropout is not None for dropout in self.dropouts)

    def seen(self, x: Float[Tensor, "row inputs"]) -> Iterator[Float[Tensor, "row inputs"]]:
        return (x if dropout is None else dropout.applied(x) for dropout in self.dropouts)


class _Adapted(torch.autograd.Function):
    """The layers' products; gradients for x, for the joined A, and for each B."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, parts: AdaptedParts, down: Tensor, *ups: Tensor) -> Tensor:
        low = _low(x, parts, down, ups)
        ctx.save_for_backward(x, low, down, *ups)
        ctx.parts = parts  # type: ignore[attr-defined]
        return _products(x, low, parts, ups)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, *ups = ctx.saved_tensors  # type: ignore[attr-defined]
        parts: AdaptedParts = ctx.parts  # type: ignore[attr-defined]
        grads, lows = grad.split(parts.outputs, dim=1), low.split([up.shape[1] for up in ups], dim=1)
        back = [(part @ up) * scale for part, up, scale in zip(grads, ups, parts.scales, strict=True)]
        grad_ups = [(part.T @ of) * scale for part, of, scale in zip(grads, lows, parts.scales, strict=True)]
        grad_low = torch.cat(back, dim=1) if len(back) > 1 else back[0]
        grad_x = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            grad_x = _grad_seen(grad_low, parts, down, ups)
            for part, base in zip(grads, parts.bases, strict=True):
                grad_x += base.product_back(part)
        return grad_x, None, _grad_down(x, grad_low, parts, ups), *grad_ups


def _low(x: Tensor, parts: AdaptedParts, down: Tensor, ups: Sequence[Tensor]) -> Float[Tensor, "row ranks"]:
    """x·Aᵀ of all layers, side by side."""
    if not parts.drop:
        return x @ down.T
    downs = down.split([up.shape[1] for up in ups])
    return torch.cat([seen @ part.T for seen, part in zip(parts.seen(x), downs, strict=True)], dim=1)


def _grad_seen(grad_low: Tensor, parts: AdaptedParts, down: Tensor, ups: Sequence[Tensor]) -> Tensor:
    """The adapters' part of the gradient of x.  Masks are made again."""
    if not parts.drop:
        return grad_low @ down
    ranks = [up.shape[1] for up in ups]
    total = grad_low.new_zeros(len(grad_low), down.shape[1])
    for dropout, grad, part in zip(parts.dropouts, grad_low.split(ranks, dim=1), down.split(ranks), strict=True):
        total += grad @ part if dropout is None else dropout.applied(grad @ part)
    return total


def _grad_down(
    x: Tensor, grad_low: Tensor, parts: AdaptedParts, ups: Sequence[Tensor]
) -> Float[Tensor, "ranks inputs"]:
    if not parts.drop:
        return grad_low.T @ x
    grads = grad_low.split([up.shape[1] for up in ups], dim=1)
    return torch.cat([grad.T @ seen for grad, seen in zip(grads, parts.seen(x), strict=True)])


def _products(x: Tensor, low: Tensor, parts: AdaptedParts, ups: Sequence[Tensor]) -> Float[Tensor, "row outputs"]:
    out = [base.product(x) for base in parts.bases]
    for y, of, up, scale in zip(out, low.split([up.shape[1] for up in ups], dim=1), ups, parts.scales, strict=True):
        if up.shape[1]:
            y.addmm_(of, up.T, alpha=scale)
    return torch.cat(out, dim=1) if len(out) > 1 else out[0]


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """Layers of one input, some with an adapter, as a `Weight`."""

    parts: AdaptedParts
    down: Float[Tensor, "ranks inputs"]
    """A of all layers, one below the other."""
    ups: tuple[Tensor, ...]
    """B of each, [outputs rank]."""

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        if not torch.is_grad_enabled():
            return _products(x, _low(x, self.parts, self.down, self.ups), self.parts, self.ups)
        out: Tensor = _Adapted.apply(x, self.parts, self.down, *self.ups)  # type: ignore[no-untyped-call]
        return out

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "AdaptedWeight":
        if not self.parts.drop:
            return self
        some = tuple(None if dropout is None else dropout.of_tokens(rows) for dropout in self.parts.dropouts)
        return replace(self, parts=replace(self.parts, dropouts=some))

    def for_inference(self) -> "AdaptedWeight":
        bases = [base if is_4_bit(base.layer) else _packed(base) for base in self.parts.bases]
        return replace(self, parts=replace(self.parts, bases=tuple(bases)))

    def owned(self) -> "AdaptedWeight":
        """See `Weight`.  The base keeps its address and is not copied."""
        return replace(self, down=self.down.detach().clone(), ups=tuple(up.detach().clone() for up in self.ups))

    def take_over(self, other: Weight) -> None:
        assert isinstance(other, AdaptedWeight)
        for mine, new in zip((self.down, *self.ups), (other.down, *other.ups), strict=True):
            mine.copy_(new)


def projection(modules: Sequence[nn.Module], dtype: torch.dtype) -> Weight:
    """Linear layers that read the same input as one, outputs side by side, in `dtype`: see `dense_projection`.

    If one has an adapter or is in 4 bits, the base of all is frozen.
    """
    layers = [adapted_layer(module) for module in modules]
    if not any(layers) and not any(is_4_bit(module) for module in modules):
        return dense_projection([cast(nn.Linear | Conv1D, module) for module in modules], dtype)
    known = [
        layer or AdaptedLayer(cast(nn.Linear | Conv1D, module), None, 0.0)
        for layer, module in zip(layers, modules, strict=True)
    ]
    parts = AdaptedParts(
        bases=tuple(FrozenBase(layer.base, dtype) for layer in known),
        outputs=tuple(layer_shape(layer.base)[0] for layer in known),
        scales=tuple(layer.scale for layer in known),
        dropouts=tuple(None if layer.factors is None else layer.dropout for layer in known),
    )
    return _joined(parts, [layer.factors for layer in known])


def _joined(parts: AdaptedParts, factors: Sequence[Factors | None]) -> AdaptedWeight:
    """The weight of these layers; one without an adapter gets rank 0."""
    like, dtype = parts.bases[0].layer, parts.bases[0].dtype
    (_, inputs), device = layer_shape(like), like.weight.device
    none = torch.zeros(0, inputs, dtype=dtype, device=device)
    downs = [none if each is None else each.down.to(dtype) for each in factors]
    ups = [
        torch.zeros(outputs, 0, dtype=dtype, device=device) if each is None else each.up.to(dtype)
        for each, outputs in zip(factors, parts.outputs, strict=True)
    ]
    return AdaptedWeight(parts, torch.cat(downs) if len(downs) > 1 else downs[0], tuple(ups))


def _packed(base: FrozenBase) -> FrozenBase:
    matrix = base.matrix()
    assert isinstance(matrix, Tensor)
    return replace(base, packed=for_inference(matrix))
