"""Gradients of large matrices written in place, instead of returned to autograd.

Autograd holds a gradient for every use of a parameter, and another for their sum.  For an output matrix that is also
the embedding, with a vocabulary of 150,000, that is the peak of an update.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

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
