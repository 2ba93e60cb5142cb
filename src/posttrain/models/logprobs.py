"""Log-probabilities of given tokens from hidden states, without ever holding all logits at once."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from posttrain.kl import full

CHUNK_ELEMENTS = 1 << 23
"""Logits held at a time on a CPU: 32 MiB in float32."""
CUDA_FACTOR = 16
"""A GPU holds so many times more: every chunk reads the whole output matrix."""


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logprobs = hidden.new_empty(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        normalisers = torch.empty_like(logprobs)
        for rows in _chunks(len(targets), head):
            logits = _logits(hidden[rows], head, temperature)
            normalisers[rows] = torch.logsumexp(logits, dim=-1)
            picked = logits.gather(1, targets[rows, None]).squeeze(1)
            logprobs[rows] = picked - normalisers[rows]
        ctx.save_for_backward(hidden, head, targets, normalisers)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        return logprobs

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, targets, normalisers = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        # Added up over chunks in float32: in bfloat16 the sum soon stands still, its next number 2^-8 away.
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=normalisers.dtype)
        for rows in _chunks(len(targets), head):
            # d logp / d logits = onehot - softmax, here in place on the recomputed logits.
            slope = _logits(hidden[rows], head, temperature).sub_(normalisers[rows, None]).exp_()
            slope.mul_(-grad[rows, None])
            slope.scatter_add_(1, targets[rows, None], grad[rows, None])
            slope = slope.div_(temperature).to(head.dtype)
            torch.mm(slope, head, out=grad_hidden[rows]) if hidden.dtype == head.dtype else grad_hidden[rows].copy_(
                slope @ head
            )
            if head.dtype == grad_head.dtype:
                grad_head.addmm_(slope.T, hidden[rows].to(head.dtype))
            else:
                grad_head += slope.T @ hidden[rows].to(head.dtype)
        return grad_hidden, grad_head.to(head.dtype), None, None


def token_logprobs(
    hidden: Float[Tensor, "token hidden"],
    head: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " token"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, " token"]:
    """log π(target) in nats of each row, differentiable in the hidden states and the output matrix.

        log π(y|h) = (h·W_y)/τ - log Σ_v exp((h·W_v)/τ)

    Works through rows in chunks and recomputes their logits in the backward pass, so memory does not grow with
    rows × vocabulary.  `temperature` is the one that sampled.
    """
    return _TokenLogprobs.apply(hidden, head, targets, temperature)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def token_entropies(
    hidden: Float[Tensor, "token hidden"], head: Float[Tensor, "vocab hidden"], *, temperature: float = 1.0
) -> Float[Tensor, " token"]:
    """Entropy -Σ_v π log π of each row's next-token distribution, in nats; a metric, without gradient."""
    entropies = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for rows in _chunks(len(hidden), head):
        logprobs = torch.log_softmax(_logits(hidden[rows], head, temperature), dim=-1)
        entropies[rows] = -(logprobs.exp() * logprobs).sum(-1)
    return entropies


def full_kl(
    hidden: Float[Tensor, "token hidden"],
    head: Float[Tensor, "vocab hidden"],
    reference: tuple[Float[Tensor, "token hidden"], Float[Tensor, "vocab hidden"]],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, " token"]:
    """KL(π‖π_ref) of whole next-token distributions, in nats per row, a chunk of rows in memory at a time.

    `reference` is the reference's hidden states and output matrix.  Chunks are recomputed in the backward pass.
    """
    dtype = head.dtype
    # The chunks' gradients are added up in this precision: in bfloat16 the sum soon stands still.
    wide = head.to(torch.promote_types(dtype, torch.float32))

    def chunk(hidden: Tensor, head: Tensor, reference_hidden: Tensor) -> Tensor:
        reference_logits = _logits(reference_hidden, reference[1], temperature)
        return full(_logits(hidden, head.to(dtype), temperature), reference_logits)

    parts = [
        checkpoint(chunk, hidden[rows], wide, reference[0][rows], use_reentrant=False)
        for rows in _chunks(len(hidden), head)
    ]
    return torch.cat(parts)


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = hidden.to(head.dtype) @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(num_rows: int, head: Tensor) -> list[slice]:
    elements = CHUNK_ELEMENTS * (CUDA_FACTOR if head.is_cuda else 1)
    size = max(1, elements // head.shape[0])
    return [slice(start, start + size) for start in range(0, num_rows, size)]
