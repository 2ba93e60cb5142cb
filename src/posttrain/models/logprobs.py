"""Log-probabilities of given tokens from hidden states, without ever holding all logits at once."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from posttrain.models.gradients import InPlaceGradient, in_place_gradient

TILE_ELEMENTS = 1 << 20
"""Logits that a CPU holds at a time: 4 MiB in float32, which its cache keeps between two operations."""
CHUNK_ELEMENTS = 1 << 23
"""The same where whole rows are needed: fewer would read a large output matrix for every few rows."""
CUDA_ELEMENTS = 1 << 27
"""Logits that a GPU holds at a time."""
TILE_ROWS = 4096
"""Rows that share one pass over a large vocabulary's output matrix."""


class _TokenLogprobs(torch.autograd.Function):
    """Works tile by tile: some rows' logits of some of the vocabulary, always at the same place in memory."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        kept: InPlaceGradient | None,
    ) -> Tensor:
        picked = hidden.new_zeros(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        normalisers = torch.empty_like(picked)
        for rows, columns in _tiles(len(targets), head):
            inputs, tile = hidden[rows].to(head.dtype), _Tile(rows, columns[0], like=picked)
            parts = picked.new_empty(len(columns), len(inputs))
            for part, vocab in zip(parts, columns, strict=True):
                logits = tile.logits(inputs, head[vocab], temperature)
                place, inside = _places(targets[rows], vocab)
                picked[rows] += logits.gather(1, place[:, None])[:, 0] * inside
                largest = logits.amax(dim=1, keepdim=True)
                torch.sum(logits.sub_(largest).exp_(), dim=1, out=part)
                part.log_().add_(largest[:, 0])
            normalisers[rows] = torch.logsumexp(parts, dim=0)
        ctx.save_for_backward(hidden, head, targets, normalisers)
        ctx.temperature, ctx.kept = temperature, kept  # type: ignore[attr-defined]
        return picked - normalisers

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, head, targets, normalisers = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature: float = ctx.temperature  # type: ignore[attr-defined]
        kept: InPlaceGradient | None = ctx.kept  # type: ignore[attr-defined]
        # Added up over tiles in float32: in bfloat16 the sum soon stands still, its next number 2^-8 away.
        grad_hidden = torch.zeros_like(hidden, dtype=normalisers.dtype)
        grad_head = None if kept is None else kept.gradient()
        if ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            grad_head = torch.zeros_like(head, dtype=normalisers.dtype)
        for rows, columns in _tiles(len(targets), head):
            inputs, tile = hidden[rows].to(head.dtype), _Tile(rows, columns[0], like=normalisers)
            for vocab in columns:
                # d logp / d logits = onehot - softmax, here in place on the recomputed logits.
                slope = tile.logits(inputs, head[vocab], temperature).sub_(normalisers[rows, None]).exp_()
                slope.mul_(-grad[rows, None])
                place, inside = _places(targets[rows], vocab)
                slope.scatter_add_(1, place[:, None], (grad[rows] * inside)[:, None])
                slope = (slope if temperature == 1.0 else slope.div_(temperature)).to(head.dtype)
                _add_product(grad_hidden[rows], slope, head[vocab])
                if grad_head is not None:
                    _add_product(grad_head[vocab], slope.T, inputs)
        returned = grad_head.to(head.dtype) if grad_head is not None and kept is None else None
        return grad_hidden.to(hidden.dtype), returned, None, None, None


class _Tile:
    """Room for one tile's logits, used for all: made anew each time, they leave the heap full of holes."""

    def __init__(self, rows: slice, vocab: slice, like: Tensor) -> None:
        self.room = like.new_empty((rows.stop - rows.start) * (vocab.stop - vocab.start))

    def logits(self, inputs: Tensor, head: Tensor, temperature: float) -> Tensor:
        """inputs · headᵀ / temperature, valid until the next call."""
        logits = self.room[: len(inputs) * len(head)].view(len(inputs), len(head))
        if inputs.dtype == logits.dtype:
            torch.mm(inputs, head.T, out=logits)
        else:
            logits.copy_(inputs @ head.T)
        return logits if temperature == 1.0 else logits.div_(temperature)


def token_logprobs(
    hidden: Float[Tensor, "token hidden"],
    head: Float[Tensor, "vocab hidden"],
    targets: Int64[Tensor, " token"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, " token"]:
    """log π(target) in nats of each row, differentiable in the hidden states and the output matrix.

        log π(y|h) = (h·W_y)/τ - log Σ_v exp((h·W_v)/τ)

    Works through tiles of rows and vocabulary and recomputes their logits in the backward pass, so memory does not
    grow with rows × vocabulary, and the output matrix is read, and its gradient written, once for thousands of rows.
    `temperature` is the one that sampled.
    """
    kept = in_place_gradient(head) if hidden.requires_grad else None
    shown = head if kept is None else head.detach()
    return _TokenLogprobs.apply(hidden, shown, targets, temperature, kept)  # type: ignore[no-any-return, no-untyped-call]


def token_entropies(
    hidden: Float[Tensor, "token hidden"], head: Float[Tensor, "vocab hidden"], *, temperature: float = 1.0
) -> Float[Tensor, " token"]:
    """Entropy -Σ_v π log π of each row's next-token distribution, in nats, a chunk of rows in memory at a time.

    Chunks are recomputed in the backward pass.
    """
    dtype = head.dtype
    wide = head.to(torch.promote_types(dtype, torch.float32))

    def chunk(hidden: Tensor, head: Tensor) -> Tensor:
        logprobs = torch.log_softmax(_logits(hidden, head.to(dtype), temperature), dim=-1)
        return -(logprobs.exp() * logprobs).sum(-1)

    return torch.cat(
        [checkpoint(chunk, hidden[rows], wide, use_reentrant=False) for rows in _chunks(len(hidden), head)]
    )


def distribution_kl(
    logits: Float[Tensor, "token vocab"], reference_logits: Float[Tensor, "token vocab"]
) -> Float[Tensor, " token"]:
    """The divergence itself, summed over the vocabulary at each position instead of estimated from one token.

        KL(π‖ref) = Σ_v π(v) (log π(v) - log ref(v))

    Both logits come already divided by the sampling temperature.  Costs the reference's logits, not just log-probs.
    """
    logprobs, reference_logprobs = logits.log_softmax(dim=-1), reference_logits.log_softmax(dim=-1)
    return (logprobs.exp() * (logprobs - reference_logprobs)).sum(dim=-1)


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
        return distribution_kl(_logits(hidden, head.to(dtype), temperature), reference_logits)

    parts = [
        checkpoint(chunk, hidden[rows], wide, reference[0][rows], use_reentrant=False)
        for rows in _chunks(len(hidden), head)
    ]
    return torch.cat(parts)


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = hidden.to(head.dtype) @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _places(targets: Int64[Tensor, " row"], vocab: slice) -> tuple[Int64[Tensor, " row"], Bool[Tensor, " row"]]:
    """Column of each row's target in this part of the vocabulary, or the nearest one, and whether it lies there."""
    place = targets - vocab.start
    nearest = place.clamp(0, vocab.stop - vocab.start - 1)
    return nearest, place == nearest


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(num_rows: int, head: Tensor) -> list[slice]:
    """Rows whose logits are held at one time."""
    return _slices(num_rows, (CUDA_ELEMENTS if head.is_cuda else CHUNK_ELEMENTS) // head.shape[0])


def _tiles(num_rows: int, head: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Tiles of logits: for each run of rows, runs of the vocabulary.  Many rows first, as they share what is read."""
    elements, vocab = CUDA_ELEMENTS if head.is_cuda else TILE_ELEMENTS, head.shape[0]
    for rows in _slices(num_rows, max(TILE_ROWS, elements // vocab)):
        yield rows, _slices(vocab, elements // (rows.stop - rows.start))


def _slices(total: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
