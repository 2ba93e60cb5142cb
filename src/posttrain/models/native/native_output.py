"""Log-probs of an update's tokens by output.c, with gradients: the output layer of models with large vocabularies."""

from ctypes import Structure, c_float, c_int64, c_void_p

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx

from posttrain.models.native.native_library import run_natively
from posttrain.models.shared_prompt.fused import InPlaceGradient, in_place_gradient


class OutputCall(Structure):
    """`Output` of output.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "hidden", "vocab")),
        ("temperature", c_float),
        *((name, c_void_p) for name in ("h", "head", "targets", "logprobs", "normalisers", "grad", "dh", "dw")),
    ]


def native_token_logprobs(
    hidden: Float[Tensor, "token hidden"],
    matrix: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " token"],
    temperature: float,
) -> Float[Tensor, " token"]:
    """As `models.logprobs.token_logprobs`, for an output layer that is a matrix."""
    kept = in_place_gradient(matrix) if hidden.requires_grad and matrix.is_contiguous() else None
    shown = matrix if kept is None else matrix.detach()
    return _Logprobs.apply(hidden, shown, targets, temperature, kept)  # type: ignore[no-any-return, no-untyped-call]


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        matrix: Tensor,
        targets: Tensor,
        temperature: float,
        kept: InPlaceGradient | None,
    ) -> Tensor:
        logprobs, normalisers = hidden.new_zeros(len(hidden)), hidden.new_zeros(len(hidden))
        given = {"h": hidden, "head": matrix, "targets": targets}
        run_natively(
            "output_forward",
            _call(hidden, matrix, temperature),
            given | {"logprobs": logprobs, "normalisers": normalisers},
        )
        ctx.save_for_backward(hidden, matrix, targets, normalisers)
        ctx.temperature, ctx.kept = temperature, kept  # type: ignore[attr-defined]
        return logprobs

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, matrix, targets, normalisers = ctx.saved_tensors  # type: ignore[attr-defined]
        kept: InPlaceGradient | None = ctx.kept  # type: ignore[attr-defined]
        of_matrix = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        dw = matrix.new_zeros(matrix.shape) if of_matrix else None if kept is None else kept.gradient()
        dh = hidden.new_empty(hidden.shape)
        given = {"h": hidden, "head": matrix, "targets": targets, "normalisers": normalisers, "grad": grad}
        call = _call(hidden, matrix, ctx.temperature)  # type: ignore[attr-defined]
        run_natively("output_backward", call, given | {"dh": dh, "dw": dw})
        return dh, dw if of_matrix else None, None, None, None


def _call(hidden: Tensor, matrix: Tensor, temperature: float) -> OutputCall:
    return OutputCall(tokens=len(hidden), hidden=hidden.shape[1], vocab=len(matrix), temperature=temperature)
