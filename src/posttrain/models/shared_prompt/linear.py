"""Linear layers as the decoder uses them: `projection` gives a `Weight`, dense, or with an adapter over a frozen base.

    y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ

A frozen base is read in place, dense or in 4 bits: nothing is joined, and only x·Aᵀ is kept for the backward pass.
Layers that read one input share one product for their A, unless dropout shows each a different part of it.  Matrices
are packed for the many small products of decoding on a CPU.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.pytorch_utils import Conv1D

from posttrain.models.adapters.adaptable import dequantized, is_4_bit, runs_packed
from posttrain.models.adapters.lora import TokenDropout, layer_shape
from posttrain.models.adapters.peft_layers import AdaptedLayer, adapted_layer

SIZES = (2, 4, 8, 16, *range(32, 257, 32))
"""Numbers of rows of products.  oneDNN compiles a kernel of half a megabyte for each.  A single row is left out: its
kernel adds in another order, so that a row's bits would depend on whether there are others."""
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
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )

    def product(self, x: Float[Tensor, "row inputs"], bias: Float[Tensor, " outputs"] | None) -> Tensor:
        """x · Wᵀ + b, with rows padded to the next of `SIZES`."""
        parts = []
        for part in x.split(MOST_ROWS):
            size = SIZES[bisect_left(SIZES, len(part))]
            padded = part if size == len(part) else F.pad(part, (0, 0, 0, size - len(part)))
            out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.weight, bias, "none", [], "")
            parts.append(out[: len(part)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


Matrix = Tensor | PackedWeight


def linear(
    x: Float[Tensor, "row inputs"], matrix: Matrix, bias: Float[Tensor, " outputs"] | None = None
) -> Float[Tensor, "row outputs"]:
    if isinstance(matrix, PackedWeight):
        return matrix.product(x, bias)
    return F.linear(x, matrix, bias)


def for_inference(matrix: Tensor) -> Matrix:
    """The matrix in its fastest form, while its numbers do not change."""
    return PackedWeight(matrix) if PackedWeight.serves(matrix) else matrix


def _dense(matrix: Matrix) -> Tensor:
    assert isinstance(matrix, Tensor), "a packed matrix follows no other"
    return matrix


class Part(NamedTuple):
    """Some outputs of a linear layer."""

    matrix: Matrix
    bias: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [_dense(self.matrix), *([] if self.bias is None else [self.bias])]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Part":
        return Part(change(_dense(self.matrix)), None if self.bias is None else change(self.bias))


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Linear layers of one input, outputs side by side: joined in one part, or one part each."""

    parts: tuple[Part, ...]

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        out = [linear(x, part.matrix, part.bias) for part in self.parts]
        return out[0] if len(out) == 1 else torch.cat(out, dim=-1)

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "DenseWeight":
        """The weight for some tokens only: the same."""
        return self

    def for_inference(self) -> "DenseWeight":
        """The same in its fastest form, while its numbers do not change.  Packing copies, so parts are joined."""
        packs = all(PackedWeight.serves(_dense(part.matrix)) for part in self.parts)
        parts = _joined(self.parts) if packs else self.parts
        return DenseWeight(tuple(Part(for_inference(_dense(part.matrix)), part.bias) for part in parts))

    def owned(self) -> "DenseWeight":
        """The same at fixed addresses; `take_over` updates it.  Frozen tensors keep theirs and are not copied."""

        def kept(tensor: Tensor) -> Tensor:
            frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            return tensor if frozen else tensor.detach().clone()

        return DenseWeight(tuple(part.map(kept) for part in self.parts))

    def take_over(self, other: "DenseWeight") -> None:
        """Copy the numbers of a weight of the same modules, in place."""
        for mine, new in zip(self.parts, other.parts, strict=True):
            for target, source in zip(mine.tensors(), new.tensors(), strict=True):
                if target.data_ptr() != source.data_ptr():  # a frozen parameter is its own copy
                    target.copy_(source)


def dense_projection(modules: Sequence[nn.Linear | Conv1D], dtype: torch.dtype) -> DenseWeight:
    """Linear layers that read the same input as one, outputs side by side, in `dtype`.

    Trained layers are joined by a differentiable concatenation, so one product serves all and gradients reach the
    model's parameters.  Frozen ones stay separate: the backward pass would keep a joined copy instead of the
    parameters.
    """
    parts = tuple(Part(weight_of(module), module.bias) for module in modules)
    if all(each.requires_grad for part in parts for each in part.tensors()):
        parts = _joined(parts)
    return DenseWeight(tuple(part.map(lambda tensor: tensor.to(dtype)) for part in parts))


@dataclass(frozen=True, slots=True)
class GatheredWeight:
    """As a `DenseWeight`, for weights that are whole only while their layer runs: the backward pass keeps no copy.

    Layers are joined for the product, and again for its backward pass.
    """

    matrices: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        bias = None
        if any(each is not None for each in self.biases):
            pairs = zip(self.matrices, self.biases, strict=True)
            bias = torch.cat([m.new_zeros(len(m)) if each is None else each for m, each in pairs]).to(x.dtype)
        return cast(Tensor, _JoinedTwice.apply(x, bias, *self.matrices))  # type: ignore[no-untyped-call]

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "GatheredWeight":
        return self


class _JoinedTwice(torch.autograd.Function):
    """x · Wᵀ + b, with W joined from matrices in the type of x."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, bias: Tensor | None, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, *matrices)
        return F.linear(x, _side_by_side(matrices, x.dtype), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors  # type: ignore[attr-defined]
        of_x, of_bias, *of_matrices = ctx.needs_input_grad  # type: ignore[attr-defined]
        parts: list[Tensor | None] = [None] * len(matrices)
        if any(of_matrices):
            rows = (grad.T @ x).split([len(each) for each in matrices])
            known = zip(rows, matrices, of_matrices, strict=True)
            parts = [part.to(matrix.dtype) if wanted else None for part, matrix, wanted in known]
        grad_x = grad @ _side_by_side(matrices, grad.dtype) if of_x else None
        return grad_x, grad.sum(0) if of_bias else None, *parts


def _side_by_side(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (matrices[0] if len(matrices) == 1 else torch.cat([*matrices])).to(dtype)


def weight_of(module: nn.Linear | Conv1D) -> Float[Tensor, "outputs inputs"]:
    """W of x · Wᵀ + b; GPT-2's layers keep it transposed."""
    return module.weight.T if isinstance(module, Conv1D) else module.weight


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """One part of all, unless only some have a bias."""
    biases = [part.bias for part in parts if part.bias is not None]
    if len(parts) == 1 or len(biases) not in (0, len(parts)):
        return parts
    return (Part(torch.cat([_dense(part.matrix) for part in parts]), torch.cat(biases) if biases else None),)


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

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        if runs_packed(self.layer):
            return cast(Tensor, self.layer(x))
        bias = self.layer.bias
        return linear(x, self.matrix(), None if bias is None else bias.detach().to(self.dtype))


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
    """The layers' products; gradients for x, for the joined A, and for each B.  Masks are made again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, parts: AdaptedParts, down: Tensor, *ups: Tensor) -> Tensor:
        low, out = _products(x, parts, down, ups)
        ctx.save_for_backward(x, low, down, *ups)
        ctx.parts = parts  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, *ups = ctx.saved_tensors  # type: ignore[attr-defined]
        parts: AdaptedParts = ctx.parts  # type: ignore[attr-defined]
        ranks = [up.shape[1] for up in ups]
        grads, lows = grad.split(parts.outputs, dim=1), low.split(ranks, dim=1)
        back = [(part @ up) * scale for part, up, scale in zip(grads, ups, parts.scales, strict=True)]
        grad_ups = [(part.T @ of) * scale for part, of, scale in zip(grads, lows, parts.scales, strict=True)]
        grad_low = torch.cat(back, dim=1) if len(back) > 1 else back[0]
        grad_lows, grad_x = grad_low.split(ranks, dim=1), None
        if parts.drop:
            grad_down = torch.cat([of.T @ seen for of, seen in zip(grad_lows, parts.seen(x), strict=True)])
        else:
            grad_down = grad_low.T @ x
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            grad_x = torch.zeros_like(x) if parts.drop else grad_low @ down
            if parts.drop:
                for dropout, of, own in zip(parts.dropouts, grad_lows, down.split(ranks), strict=True):
                    grad_x += of @ own if dropout is None else dropout.applied(of @ own)
            for part, base in zip(grads, parts.bases, strict=True):
                grad_x += part @ _dense(base.matrix())
        return grad_x, None, grad_down, *grad_ups


def _products(
    x: Tensor, parts: AdaptedParts, down: Tensor, ups: Sequence[Tensor]
) -> tuple[Float[Tensor, "row ranks"], Float[Tensor, "row outputs"]]:
    """x·Aᵀ of all layers, side by side, and the layers' products."""
    ranks = [up.shape[1] for up in ups]
    if parts.drop:
        seen = zip(parts.seen(x), down.split(ranks), strict=True)
        low = torch.cat([given @ part.T for given, part in seen], dim=1)
    else:
        low = x @ down.T
    out = [base.product(x) for base in parts.bases]
    for y, of, up, scale in zip(out, low.split(ranks, dim=1), ups, parts.scales, strict=True):
        if up.shape[1]:
            y.addmm_(of, up.T, alpha=scale)
    return low, torch.cat(out, dim=1) if len(out) > 1 else out[0]


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """Layers of one input, some with an adapter, in the place of a `DenseWeight`."""

    parts: AdaptedParts
    down: Float[Tensor, "ranks inputs"]
    """A of all layers, one below the other."""
    ups: tuple[Tensor, ...]
    """B of each, [outputs rank]."""
    packed: tuple[Matrix, ...] = ()
    """A of all and B of each in inference's fastest order, if they were packed."""

    def product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        if self.packed:
            return self._packed_product(x)
        if not torch.is_grad_enabled():
            return _products(x, self.parts, self.down, self.ups)[1]
        return cast(Tensor, _Adapted.apply(x, self.parts, self.down, *self.ups))  # type: ignore[no-untyped-call]

    def _packed_product(self, x: Float[Tensor, "row inputs"]) -> Float[Tensor, "row outputs"]:
        down, *ups = self.packed
        lows = linear(x, down).split([up.shape[1] for up in self.ups], dim=1)
        out = [base.product(x) for base in self.parts.bases]
        for y, low, up, scale in zip(out, lows, ups, self.parts.scales, strict=True):
            if low.shape[1]:
                y.add_(linear(low.contiguous(), up), alpha=scale)
        return torch.cat(out, dim=1) if len(out) > 1 else out[0]

    def of_tokens(self, rows: Int64[Tensor, " kept"]) -> "AdaptedWeight":
        some = tuple(None if dropout is None else dropout.of_tokens(rows) for dropout in self.parts.dropouts)
        return replace(self, parts=replace(self.parts, dropouts=some))

    def for_inference(self) -> "AdaptedWeight":
        bases = [
            base if is_4_bit(base.layer) else replace(base, packed=for_inference(_dense(base.matrix())))
            for base in self.parts.bases
        ]
        packs = self.down.numel() > 0 and PackedWeight.serves(self.down)
        packed = [for_inference(each) if each.numel() else each for each in (self.down, *self.ups)] if packs else []
        return replace(self, parts=replace(self.parts, bases=tuple(bases)), packed=tuple(packed))

    def owned(self) -> "AdaptedWeight":
        """The same at fixed addresses.  The base keeps its address and is not copied."""
        return replace(self, down=self.down.detach().clone(), ups=tuple(up.detach().clone() for up in self.ups))

    def take_over(self, other: "AdaptedWeight") -> None:
        for mine, new in zip((self.down, *self.ups), (other.down, *other.ups), strict=True):
            mine.copy_(new)


Weight = DenseWeight | GatheredWeight | AdaptedWeight


def projection(modules: Sequence[nn.Module], dtype: torch.dtype, *, keeps_copies: bool = True) -> Weight:
    """Linear layers that read the same input as one, outputs side by side, in `dtype`: see `dense_projection`.

    If one has an adapter or is in 4 bits, the base of all is frozen; one without an adapter gets rank 0.  Without
    `keeps_copies` the backward pass keeps only the parameters themselves.
    """
    layers = [adapted_layer(module) for module in modules]
    if not any(layers) and not any(is_4_bit(module) for module in modules):
        dense = [cast(nn.Linear | Conv1D, module) for module in modules]
        if not keeps_copies:
            return GatheredWeight(tuple(map(weight_of, dense)), tuple(module.bias for module in dense))
        return dense_projection(dense, dtype)
    known = [
        layer or AdaptedLayer(cast(nn.Linear | Conv1D, module), None, 0.0)
        for layer, module in zip(layers, modules, strict=True)
    ]
    (_, inputs), device = layer_shape(known[0].base), known[0].base.weight.device
    parts = AdaptedParts(
        bases=tuple(FrozenBase(layer.base, dtype) for layer in known),
        outputs=tuple(layer_shape(layer.base)[0] for layer in known),
        scales=tuple(layer.scale for layer in known),
        dropouts=tuple(None if layer.factors is None else layer.dropout for layer in known),
    )
    downs, ups = [], []
    for layer, outputs in zip(known, parts.outputs, strict=True):
        none = torch.zeros(0, inputs, dtype=dtype, device=device), torch.zeros(outputs, 0, dtype=dtype, device=device)
        down, up = none if layer.factors is None else (layer.factors.down, layer.factors.up)
        downs.append(down.to(dtype))
        ups.append(up.to(dtype))
    return AdaptedWeight(parts, torch.cat(downs) if len(downs) > 1 else downs[0], tuple(ups))
