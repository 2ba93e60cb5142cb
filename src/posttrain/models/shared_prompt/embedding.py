"""Token embeddings whose gradient can be added, as rows, to the gradient that is already there."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from posttrain.models.gradients import InPlaceGradient, in_place_gradient


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
