"""Log-probabilities of given tokens from hidden states, without holding all logits at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from posttrain.models.model_outputs import OutputLayer
from posttrain.models.shared_prompt.fused import InPlaceGradient, in_place_gradient

TILE_ELEMENTS = 1 << 20
"""Logits that a CPU holds at a time: 4 MiB in float32, which stay in its cache between two operations."""
CHUNK_ELEMENTS = 1 << 23
"""The same for whole rows: fewer would read a large output matrix for every few rows."""
CUDA_ELEMENTS = 1 << 27
"""Logits that a GPU holds at a time."""
TILE_ROWS = 4096
"""Rows that share one pass over a large vocabulary's output matrix."""


@dataclass(frozen=True, slots=True)
class _Settings:
    temperature: float
    soft_cap: float | None
    scale: float
    kept: InPlaceGradient | None


class _TokenLogprobs(torch.autograd.Function):
    """Works tile by tile, each with some rows' logits of a part of the vocabulary, in the same memory."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> Tensor:
        picked = hidden.new_zeros(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        normalisers = torch.empty_like(picked)
        layer = OutputLayer(head, bias, settings.soft_cap, settings.scale)
        for rows, columns in _tiles(len(targets), head):
            inputs = hidden[rows].to(head.dtype)
            room = picked.new_empty(len(inputs) * (columns[0].stop - columns[0].start))
            parts = picked.new_empty(len(columns), len(inputs))
            for part, vocab in zip(parts, columns, strict=True):
                logits = _tile_logits(room, inputs, layer.part(vocab), settings.temperature)
                place, inside = _places(targets[rows], vocab)
                picked[rows] += logits.gather(1, place[:, None])[:, 0] * inside
                largest = logits.amax(dim=1, keepdim=True)
                torch.sum(logits.sub_(largest).exp_(), dim=1, out=part)
                part.log_().add_(largest[:, 0])
            normalisers[rows] = torch.logsumexp(parts, dim=0)
        ctx.save_for_backward(hidden, head, bias, targets, normalisers)  # type: ignore[arg-type]
        ctx.settings = settings  # type: ignore[attr-defined]
        return picked - normalisers

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden, head, bias, targets, normalisers = ctx.saved_tensors  # type: ignore[attr-defined]
        settings: _Settings = ctx.settings  # type: ignore[attr-defined]
        layer = OutputLayer(head, bias, settings.soft_cap, settings.scale)
        # Summed over tiles in float32: in bfloat16 the sum soon stops growing, its next number is 2^-8 away.
        grad_hidden = torch.zeros_like(hidden, dtype=normalisers.dtype)
        grad_head = None if settings.kept is None else settings.kept.gradient()
        if ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            grad_head = torch.zeros_like(head, dtype=normalisers.dtype)
        grad_bias = None
        if ctx.needs_input_grad[2]:  # type: ignore[attr-defined]
            grad_bias = torch.zeros_like(bias, dtype=normalisers.dtype)
        for rows, columns in _tiles(len(targets), head):
            inputs = hidden[rows].to(head.dtype)
            room = normalisers.new_empty(len(inputs) * (columns[0].stop - columns[0].start))
            for vocab in columns:
                # d logp / d logits = onehot - softmax, here in place on the recomputed logits.
                logits = _tile_logits(room, inputs, layer.part(vocab), settings.temperature)
                slope_of_cap = None  # d(soft_cap · tanh(z / soft_cap)) / dz = 1 - (logit / soft_cap)²
                if layer.soft_cap is not None:
                    slope_of_cap = (logits * (settings.temperature / layer.soft_cap)).square_().neg_().add_(1)
                slope = logits.sub_(normalisers[rows, None]).exp_()
                slope.mul_(-grad[rows, None])
                place, inside = _places(targets[rows], vocab)
                slope.scatter_add_(1, place[:, None], (grad[rows] * inside)[:, None])
                slope = slope if settings.temperature == 1.0 else slope.div_(settings.temperature)
                slope = slope if slope_of_cap is None else slope.mul_(slope_of_cap)
                slope = (slope if settings.scale == 1.0 else slope.mul_(settings.scale)).to(head.dtype)
                _add_product(grad_hidden[rows], slope, head[vocab])
                if grad_head is not None:
                    _add_product(grad_head[vocab], slope.T, inputs)
                if grad_bias is not None:
                    grad_bias[vocab] += slope.sum(dim=0, dtype=grad_bias.dtype)
        returned = grad_head.to(head.dtype) if grad_head is not None and settings.kept is None else None
        returned_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden.to(hidden.dtype), returned, returned_bias, None, None


def _tile_logits(room: Tensor, inputs: Tensor, layer: OutputLayer, temperature: float) -> Tensor:
    """A layer's logits / temperature, in memory that all tiles reuse: new memory each time fragments the heap."""
    head = layer.matrix
    logits = room[: len(inputs) * len(head)].view(len(inputs), len(head))
    if inputs.dtype == logits.dtype:
        torch.mm(inputs, head.T, out=logits)
    else:
        logits.copy_(inputs @ head.T)
    if layer.bias is not None:
        logits.add_(layer.bias)
    if layer.scale != 1.0:
        logits.mul_(layer.scale)
    if layer.soft_cap is not None:
        logits.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def token_logprobs(
    hidden: Float[Tensor, "token hidden"],
    output_layer: OutputLayer,
    targets: Int64[Tensor, " token"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, " token"]:
    """log π(target) in nats of each row, differentiable in the hidden states and the output layer.

        log π(y|h) = logit_y/τ - log Σ_v exp(logit_v/τ)

    Works through tiles of rows and vocabulary and recomputes their logits in the backward pass, so memory does not grow
    with rows × vocabulary.  Thousands of rows share one pass over the output matrix and its gradient.
    """
    matrix = output_layer.matrix
    kept = in_place_gradient(matrix) if hidden.requires_grad else None
    shown = matrix if kept is None else matrix.detach()
    settings = _Settings(temperature, output_layer.soft_cap, output_layer.scale, kept)
    return _TokenLogprobs.apply(hidden, shown, output_layer.bias, targets, settings)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class NextTokens:
    """A model's next-token distributions at some positions; logits are made for slices of them."""

    hidden: Float[Tensor, "token hidden"]
    output_layer: OutputLayer

    def logits(self, rows: slice = slice(None), *, temperature: float = 1.0) -> Float[Tensor, "row vocab"]:
        return _logits(self.hidden[rows], self.output_layer, temperature)


def token_entropies(
    hidden: Float[Tensor, "token hidden"], output_layer: OutputLayer, *, temperature: float = 1.0
) -> Float[Tensor, " token"]:
    """Entropy -Σ_v π log π of each row's next-token distribution, in nats; see `_by_chunks`."""

    def entropies(logits: Tensor, _: slice) -> Tensor:
        logprobs = torch.log_softmax(logits, dim=-1)
        return -(logprobs.exp() * logprobs).sum(-1)

    return _by_chunks(entropies, hidden, output_layer, temperature)


@torch.no_grad()
def token_statistics(
    hidden: Float[Tensor, "token hidden"],
    output_layer: OutputLayer,
    targets: Int64[Tensor, " token"],
    *,
    temperature: float = 1.0,
) -> tuple[Float64[Tensor, " token"], Bool[Tensor, " token"]]:
    """Entropy in nats before each target, and whether the target is the likeliest token; without a gradient."""
    entropies, likeliest = [], []
    for rows in _chunks(len(hidden), output_layer):
        logprobs = torch.log_softmax(_logits(hidden[rows], output_layer, temperature), dim=-1)
        likeliest.append(logprobs.argmax(dim=-1) == targets[rows])
        entropies.append(-(logprobs.exp() * logprobs).sum(-1, dtype=torch.float64))
    return torch.cat(entropies), torch.cat(likeliest)


def distribution_kl(
    logits: Float[Tensor, "token vocab"], reference_logits: Float[Tensor, "token vocab"]
) -> Float[Tensor, " token"]:
    """KL(π‖ref) = Σ_v π(v) (log π(v) - log ref(v)) at each position; both logits are already divided by temperature."""
    logprobs, reference_logprobs = logits.log_softmax(dim=-1), reference_logits.log_softmax(dim=-1)
    return (logprobs.exp() * (logprobs - reference_logprobs)).sum(dim=-1)


def full_kl(
    hidden: Float[Tensor, "token hidden"], output_layer: OutputLayer, reference: NextTokens, *, temperature: float = 1.0
) -> Float[Tensor, " token"]:
    """KL(π‖π_ref) of whole next-token distributions, in nats per row; `reference` predicts the same tokens."""

    def divergences(logits: Tensor, rows: slice) -> Tensor:
        return distribution_kl(logits, reference.logits(rows, temperature=temperature))

    return _by_chunks(divergences, hidden, output_layer, temperature)


def _by_chunks(
    of_logits: Callable[[Tensor, slice], Tensor], hidden: Tensor, output_layer: OutputLayer, temperature: float
) -> Tensor:
    """A number of each row's logits, a chunk of rows in memory at a time and again in the backward pass."""
    dtype = output_layer.matrix.dtype
    # The chunks' gradients are summed in this precision: in bfloat16 the sum soon stops growing.
    wide = output_layer.to(torch.promote_types(dtype, torch.float32))

    def chunk(hidden: Tensor, matrix: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        layer = replace(output_layer, matrix=matrix, bias=bias).to(dtype)
        return of_logits(_logits(hidden, layer, temperature), rows)

    parts = [
        checkpoint(chunk, hidden[rows], wide.matrix, wide.bias, rows, use_reentrant=False)
        for rows in _chunks(len(hidden), output_layer)
    ]
    return torch.cat(parts)


def _logits(hidden: Tensor, output_layer: OutputLayer, temperature: float) -> Tensor:
    logits = output_layer.logits(hidden)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _places(targets: Int64[Tensor, " row"], vocab: slice) -> tuple[Int64[Tensor, " row"], Bool[Tensor, " row"]]:
    """Column of each row's target in this part of the vocabulary, or the nearest one, and whether it is there."""
    place = targets - vocab.start
    nearest = place.clamp(0, vocab.stop - vocab.start - 1)
    return nearest, place == nearest


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(num_rows: int, output_layer: OutputLayer) -> list[slice]:
    elements = CUDA_ELEMENTS if output_layer.matrix.is_cuda else CHUNK_ELEMENTS
    return _slices(num_rows, elements // output_layer.num_logits) or [slice(0, 0)]


def _tiles(num_rows: int, head: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Tiles of logits: for each run of rows, runs of the vocabulary.  Many rows first, as they share reads."""
    elements, vocab = CUDA_ELEMENTS if head.is_cuda else TILE_ELEMENTS, head.shape[0]
    for rows in _slices(num_rows, max(TILE_ROWS, elements // vocab)):
        yield rows, _slices(vocab, elements // (rows.stop - rows.start))


def _slices(total: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
