"""Elementwise layers as single autograd nodes.

On a CPU a small model spends as long in memory passes over activations as in matrix products; these write each
activation once, composed operations five times.

`gradients_in_place` is for large matrices: autograd holds a gradient for every use of a parameter, and another for
their sum.  For an output matrix that is also the embedding, with a vocabulary of 150,000, that is an update's peak.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = _inverse_rms(x, eps)
        normed = _normed(x, inverse_rms, weight)
        ctx.save_for_backward(normed, inverse_rms, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse_rms, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = grad.to(inverse_rms.dtype)
        grad_weight = (grad * normed).sum_to_size(weight.shape)
        grad_normed = grad * weight
        along = (grad_normed * normed).mean(dim=-1, keepdim=True)
        return grad_normed.addcmul_(normed, along, value=-1).mul_(inverse_rms), grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _rotated(grad, cos, -sin), None, None


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation and its gradient."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], object]
    """backward(grad, gate, out) writes the gradient of the gate to `out`."""


SILU = Activation(F.silu, lambda grad, gate, out: torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out))
GELU_TANH = Activation(
    partial(F.gelu, approximate="tanh"),
    lambda grad, gate, out: torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate="tanh", grad_input=out),
)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate_up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation  # type: ignore[attr-defined]
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.value(gate).mul_(up)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors  # type: ignore[attr-defined]
        activation: Activation = ctx.activation  # type: ignore[attr-defined]
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, activation.value(gate), out=grad_up)
        activation.backward(grad * up, gate, grad_gate)
        return grad_gate_up, None


def rms_norm(x: Float[Tensor, "*rows width"], weight: Float[Tensor, "*weights width"], eps: float) -> Tensor:
    """Scale rows to unit root mean square, then by a learned weight.

        y = w · x / √(mean(x²) + ε)     Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4

    `weight` is one row, or one row per head (the last two axes of x).  Means are taken in float32 at least; the result
    has the wider of the two types, x's and the weight's.
    """
    if not torch.is_grad_enabled():
        return _normed(x, _inverse_rms(x, eps), weight) * weight
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def rotate(
    x: Float[Tensor, "token head width"], cos: Float[Tensor, "token 1 turned"], sin: Float[Tensor, "token 1 turned"]
) -> Float[Tensor, "token head width"]:
    """Turn each pair (x_i, x_{i+width/2}) by its position's angle: rotary embedding, half-split layout.

        y = x · cos + swap(x) · sin     swap exchanges the halves; sin is negated in the first

    Su et al. 2021 (RoFormer), arXiv:2104.09864, eq. 34, with the pairing of the Llama family.  With angles for only
    the first elements of a head, the others do not change.
    """
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotate(x[..., :turned], cos, sin), x[..., turned:]], dim=-1)
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin)
    rotated: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def gated(gate_up: Float[Tensor, "token two_mlp"], activation: Activation) -> Float[Tensor, "token mlp"]:
    """The gated activation of [gate, up] side by side.

    y = silu(gate) · up, or gelu(gate) · up with gelu's tanh form     Shazeer 2020, arXiv:2002.05202, eq. 6
    """
    if not torch.is_grad_enabled():
        gate, up = gate_up.chunk(2, dim=-1)
        return activation.value(gate).mul_(up)
    out: Tensor = _Gated.apply(gate_up, activation)  # type: ignore[no-untyped-call]
    return out


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    precise = torch.promote_types(x.dtype, torch.float32)  # bfloat16 would be off by 0.4 %
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, inverse_rms: Tensor, weight: Tensor) -> Tensor:
    return (x * inverse_rms).to(torch.promote_types(x.dtype, weight.dtype))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


_IN_PLACE = ContextVar("in_place", default=False)


@contextmanager
def gradients_in_place() -> Iterator[None]:
    """Have operations of `models/` add to `parameter.grad` in their backward pass, if they can, and return nothing.

    For forward passes that end in `Tensor.backward`; `torch.autograd.grad` and hooks of the parameter do not see these
    gradients.
    """
    token = _IN_PLACE.set(True)
    try:
        yield
    finally:
        _IN_PLACE.reset(token)


@dataclass(frozen=True, slots=True)
class InPlaceGradient:
    """A parameter whose gradient is hidden from autograd; a record, as a tensor argument would join the graph."""

    parameter: Tensor

    def gradient(self) -> Tensor:
        """`parameter.grad`, initially zeros."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return self.parameter.grad


def in_place_gradient(weight: Tensor) -> InPlaceGradient | None:
    wanted = _IN_PLACE.get() and torch.is_grad_enabled() and weight.requires_grad
    return InPlaceGradient(weight) if wanted and isinstance(weight, nn.Parameter) else None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: Tensor, table: InPlaceGradient, tokens: Tensor, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table, ctx.padding = table, padding  # type: ignore[attr-defined]
        return table.parameter.detach().index_select(0, tokens)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors  # type: ignore[attr-defined]
        table: InPlaceGradient = ctx.table  # type: ignore[attr-defined]
        padding: int | None = ctx.padding  # type: ignore[attr-defined]
        if padding is not None:
            grad = grad * (tokens != padding)[:, None]
        table.gradient().index_add_(0, tokens, grad)
        return None, None, None, None


def embed(embedding: nn.Embedding, tokens: Int64[Tensor, " token"]) -> Float[Tensor, "token hidden"]:
    """Rows of an embedding.  Its gradient can be written in place on a CPU; CUDA adds rows in no fixed order."""
    weight, padding = embedding.weight, embedding.padding_idx
    table = in_place_gradient(weight)
    if table is None or weight.device.type != "cpu":
        return F.embedding(tokens, weight, padding)
    anchor = torch.empty(0, requires_grad=True)  # makes the rows part of the graph
    rows: Tensor = _Rows.apply(anchor, table, tokens, padding)  # type: ignore[no-untyped-call]
    return rows
