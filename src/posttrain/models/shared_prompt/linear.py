"""Linear layers as the decoder uses them: `projection` gives a `Weight`, dense, or with an adapter over a frozen base.

    y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ

A frozen base is read in place, dense or in 4 bits: nothing is joined, and only x·Aᵀ is kept for the backward pass.
Layers that read one input share one product for their A, unless dropout shows each a different part of it.  Matrices
are packed for the many small products of decoding on a CPU.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.pytorch_utils import Conv1D

from posttrain.models.adapters.dropout import TokenDropout
from posttrain.models.adapters.lora import Factors, layer_shape
from posttrain.models.adapters.peft_layers import AdaptedLayer, adapted_layer
from posttrain.models.adapters.quantized import dequantized, is_4_bit, runs_packed

SIZES = (1, 2, 4, 8, 16, *range(32, 257, 32))
"""Numbers of rows of products.  oneDNN compiles a kernel of half a megabyte for each."""
MOST_ROWS = SIZES[-1]
USUAL_ROWS = 32
"""Rows of a product for which the order is optimal; it works for all."""


class PackedWeight:
    """A float32 matrix in oneDNN's order, so that products do not have to reorder it first.

    At 32 rows a product takes 40 % of the time, at 1,200 rows 85 % (benchmarks/linear.py).  For inference: the copy
    does not follow its weight.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"]) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), USUAL_ROWS)

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether this machine and precision support it."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )

    def product(self, x: Float[Tensor, "row inputs"], bias: Float[Tensor, " outputs"] | None) -> Tensor:
        parts = [self._part(part, bias) for part in x.split(MOST_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same for few rows, padded to the next of `SIZES`."""
        rows = len(x)
        size = SIZES[bisect_left(SIZES, rows)]
        padded = x if size == rows else F.pad(x, (0, 0, 0, size - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.weight, bias, "none", [], "")
        return out[:rows]


Matrix = Tensor | PackedWeight


@runtime_checkable
class Weight(Protocol):
    """A linear layer as the decoder uses it, x · Wᵀ + b, in whatever form it is kept."""

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]: ...

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "Weight": ...

    def for_inference(self) -> "Weight":
        """The same in its fastest form, while its numbers do not change."""
        ...

    def owned(self) -> "Weight":
        """The same at fixed addresses; `take_over` updates it."""
        ...

    def take_over(self, other: "Weight") -> None:
        """Copy the numbers of a weight of the same modules, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a linear layer."""

    matrix: Matrix
    bias: Tensor | None = None

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        return linear(x, self.matrix, self.bias)


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Linear layers of one input, outputs side by side: joined in one part, or one part each."""

    parts: tuple[Part, ...]

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        if len(self.parts) == 1:
            return self.parts[0].product(x)
        return torch.cat([part.product(x) for part in self.parts], dim=-1)

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "DenseWeight":
        return self

    def for_inference(self) -> "DenseWeight":
        """See `Weight`.  Packing copies anyway, so parts are joined."""
        parts = self.parts
        if all(PackedWeight.serves(_tensor(part)) for part in parts):
            parts = _joined(parts)
        return DenseWeight(tuple(Part(for_inference(_tensor(part)), part.bias) for part in parts))

    def owned(self) -> "DenseWeight":
        """See `Weight`.  Frozen tensors keep their address and are not copied."""
        return DenseWeight(
            tuple(Part(_kept(_tensor(part)), None if part.bias is None else _kept(part.bias)) for part in self.parts)
        )

    def take_over(self, other: Weight) -> None:
        assert isinstance(other, DenseWeight)
        for mine, new in zip(self.parts, other.parts, strict=True):
            _write(_tensor(mine), _tensor(new))
            if mine.bias is not None and new.bias is not None:
                _write(mine.bias, new.bias)


def dense_projection(modules: Sequence[nn.Linear | Conv1D], dtype: torch.dtype) -> Weight:
    """Linear layers that read the same input as one, outputs side by side, in `dtype`.

    Trained layers are joined by a differentiable concatenation, so one product serves all and gradients reach the
    model's parameters.  Frozen ones stay apart: the backward pass would keep a joined copy instead of the parameters.
    """
    parameters = [
        parameter for module in modules for parameter in (module.weight, module.bias) if parameter is not None
    ]
    trained = all(parameter.requires_grad for parameter in parameters)
    parts = tuple(Part(weight_of(module), module.bias) for module in modules)
    if trained:
        parts = _joined(parts)
    return DenseWeight(tuple(_part(_tensor(part), part.bias, dtype) for part in parts))


def weight_of(module: nn.Linear | Conv1D) -> Float[Tensor, "outputs inputs"]:
    """W of x · Wᵀ + b; GPT-2's layers keep it transposed."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight


def linear(
    x: Float[Tensor, "row inputs"], matrix: Matrix, bias: Float[Tensor, " outputs"] | None = None
) -> Float[Tensor, "row outputs"]:
    if isinstance(matrix, PackedWeight):
        return matrix.product(x, bias)
    return F.linear(x, matrix, bias)


def for_inference(matrix: Tensor) -> Matrix:
    return PackedWeight(matrix) if PackedWeight.serves(matrix) else matrix


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """One part of all, unless only some have a bias."""
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) == 1 or len(biases) not in (0, len(parts)):
        return parts
    return (Part(torch.cat([_tensor(part) for part in parts]), torch.cat(biases) if biases else None),)


def _part(matrix: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Part:
    return Part(matrix.to(dtype), None if bias is None else bias.to(dtype))


def _tensor(part: Part) -> Tensor:
    assert isinstance(part.matrix, Tensor), "a packed matrix follows no other"
    return part.matrix


def _write(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():  # a frozen parameter is its own copy
        target.copy_(source)


def _kept(tensor: Tensor) -> Tensor:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return tensor if frozen else tensor.detach().clone()


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
    return _adapted_weight(parts, [layer.factors for layer in known])


def _adapted_weight(parts: AdaptedParts, factors: Sequence[Factors | None]) -> AdaptedWeight:
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
