"""Drawing tokens from logits with given uniform numbers: exact, independent by row, and free of hidden state."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from posttrain.errors import RunError
from posttrain.options.rollout import SamplingParams

SMALL_VOCAB = 2048
"""Up to this many tokens, one float64 cumulative sum is fastest on a CPU."""

ENTRIES_AT_ONCE = 2**20
"""Logits that a CPU handles at a time: few enough that intermediate results stay in its cache."""

BLOCKS_AT_ONCE = 64
"""Blocks with a float64 copy at a time while block sums are made."""


class SampledTokens(NamedTuple):
    """One token per row and its log-probabilities in nats."""

    tokens: Int64[Tensor, " row"]
    logprobs: Float[Tensor, " row"]
    """After temperature and before any cut."""
    cut_logprobs: Float[Tensor, " row"] | None
    """Under the distribution that was sampled; None if nothing is cut."""


def sample(
    logits: Float[Tensor, "row vocab"], uniform: Float64[Tensor, " row"], sampling: SamplingParams
) -> SampledTokens:
    """Draw one token per row by inverting the cumulative distribution at `uniform`, in [0, 1).

        token = min {v : Σ_{w ≤ v} p_w > u},   p = softmax(logits / temperature), cut and scaled to sum to 1

    Nothing here waits for the device or depends on the values, so a CUDA graph can hold it.  A row with NaN, +inf or
    only -inf gets a NaN log-prob, which `require_finite` finds.  A token of probability 0 is never drawn.
    """
    rows_at_once = max(1, ENTRIES_AT_ONCE // logits.shape[1])
    if logits.device.type == "cpu" and len(logits) > rows_at_once:
        pieces = zip(logits.split(rows_at_once), uniform.split(rows_at_once), strict=True)
        some = list(zip(*(sample(*piece, sampling) for piece in pieces), strict=True))
        return SampledTokens(torch.cat(some[0]), torch.cat(some[1]), None if some[2][0] is None else torch.cat(some[2]))
    scale = sampling.recorded_temperature
    work_type = torch.promote_types(logits.dtype, torch.float32)
    probabilities = torch.softmax(logits if scale == 1 else logits / scale, dim=-1, dtype=work_type)
    if sampling.greedy:
        tokens = probabilities.argmax(dim=-1)
        return SampledTokens(tokens, at(probabilities, tokens).log(), None)
    if not sampling.cuts:
        tokens, total = invert(probabilities, uniform)
        return SampledTokens(tokens, log_share(probabilities, tokens, total), None)
    tokens, kept = invert(torch.where(keep(probabilities, sampling), probabilities, 0.0), uniform)
    logprobs = at(probabilities, tokens).log()
    return SampledTokens(tokens, logprobs, log_share(probabilities, tokens, kept))


def at(weights: Shaped[Tensor, "row n"], index: Int64[Tensor, " row"]) -> Shaped[Tensor, " row"]:
    return weights.gather(1, index[:, None])[:, 0]


def log_share(
    weights: Float[Tensor, "row vocab"], tokens: Int64[Tensor, " row"], total: Float64[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """log(weight / total) in nats.  Dividing by the float64 sum takes softmax's own rounding of its sum back out."""
    return (at(weights, tokens) / total).log().to(weights.dtype)


def invert(
    weights: Float[Tensor, "row vocab"], uniform: Float64[Tensor, " row"]
) -> tuple[Int64[Tensor, " row"], Float64[Tensor, " row"]]:
    """The first token whose cumulative weight exceeds `uniform` of the row's total, and that total.

    Sums are in float64: in float32 they move 4 tokens in 1,000 of a vocabulary of 151,936, and a quarter of them where
    each is rounded before the next is added (measured).  A large vocabulary has two levels, sums of blocks of about
    √vocab tokens and then the tokens of one block, without a float64 copy of the whole.
    """
    if weights.shape[1] <= SMALL_VOCAB and weights.device.type == "cpu":
        cumulative = weights.cumsum(dim=1, dtype=torch.float64)  # one token after the other, so it never falls
        total = cumulative[:, -1]
        found = torch.searchsorted(cumulative, (uniform * total)[:, None], right=True)[:, 0]
        return found.clamp(max=weights.shape[1] - 1), total  # only NaN is found beyond the end
    return invert_by_blocks(weights, uniform)


def invert_by_blocks(
    weights: Float[Tensor, "row vocab"], uniform: Float64[Tensor, " row"]
) -> tuple[Int64[Tensor, " row"], Float64[Tensor, " row"]]:
    """`invert` in two levels, for a large vocabulary and for devices that add in parallel."""
    vocab = weights.shape[1]
    size = 2 ** math.ceil(math.log2(vocab) / 2)
    whole = vocab // size * size
    runs = weights[:, :whole].unflatten(1, (-1, size))  # [row block size], in float64 a few blocks at a time
    parts = [part.sum(dim=2, dtype=torch.float64) for part in runs.split(BLOCKS_AT_ONCE, dim=1)]
    if whole < vocab:
        parts.append(weights[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float64))
    sums = torch.cat(parts, dim=1)
    cumulative = sums.cumsum(dim=1)
    total = cumulative[:, -1]
    target = uniform * total
    block = first_exceeding(sums, cumulative, target)
    position = block[:, None] * size + torch.arange(size, device=weights.device)  # [row size]
    inside = weights.gather(1, position.clamp(max=vocab - 1)).double()
    inside = torch.where(position < vocab, inside, 0.0)
    offset = first_exceeding(inside, inside.cumsum(dim=1), target - (at(cumulative, block) - at(sums, block)))
    return at(position, offset), total


def first_exceeding(
    weights: Float64[Tensor, "row n"], cumulative: Float64[Tensor, "row n"], target: Float64[Tensor, " row"]
) -> Int64[Tensor, " row"]:
    """Index of the first entry whose cumulative weight exceeds the target; never one of weight 0.

    Where rounding leaves every cumulative weight at or below the target, or a parallel sum lets a weightless entry
    exceed it, the answer is the last entry that has weight.
    """
    found = torch.searchsorted(cumulative, target[:, None], right=True).clamp(max=weights.shape[1] - 1)
    has_weight = torch.where(weights > 0, torch.arange(weights.shape[1], device=weights.device), 0)
    return torch.where(weights.gather(1, found)[:, 0] > 0, found[:, 0], has_weight.amax(dim=1))


def keep(probabilities: Float[Tensor, "row vocab"], sampling: SamplingParams) -> Bool[Tensor, "row vocab"]:
    """The tokens that remain after the cuts: top-k, then top-p of those, then min-p.

    top-p keeps a token while the tokens before it, likeliest first, hold less than top_p of the mass; the likeliest
    token always stays.  Equal probabilities are taken in the order of token ids, which no sort guarantees.
    """
    kept = torch.ones_like(probabilities, dtype=torch.bool)
    if sampling.min_p > 0:
        kept = probabilities >= sampling.min_p * probabilities.amax(dim=1, keepdim=True)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return kept
    likeliest = largest(probabilities, sampling.top_k)
    mass = likeliest.cumsum(dim=1, dtype=torch.float64)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    # At top_p = 1 the top-k tokens all stay, also those too small to move the sum.
    stays = before < (sampling.top_p * mass[:, -1:] if sampling.top_p < 1 else torch.inf)
    last = torch.where(stays, likeliest, torch.inf).amin(dim=1, keepdim=True)
    num_equal = (stays & (likeliest == last)).sum(dim=1, keepdim=True)
    equal = probabilities == last
    first_equals = equal & (equal.cumsum(dim=1, dtype=torch.int32) <= num_equal)
    return kept & ((probabilities > last) | first_equals)


def largest(weights: Float[Tensor, "row vocab"], count: int) -> Float[Tensor, "row largest"]:
    """The `count` largest entries of each row, or all for 0, in descending order."""
    vocab = weights.shape[1]
    count = min(count or vocab, vocab)
    if weights.device.type == "cpu" and (vocab <= SMALL_VOCAB or count == vocab):
        ordered = np.sort(weights.detach().numpy(), axis=1)  # 3 to 20 times as fast as torch.sort and torch.topk
        return torch.from_numpy(ordered).flip(1)[:, :count]
    return weights.topk(count, dim=1).values


def require_finite(logprobs: Float[Tensor, " row"], *, row_name: Callable[[int], str] = "row {}".format) -> None:
    """Raise RunError with the name of the first row that has a NaN log-prob, from logits that are not finite.

    Separate from `sample` because it waits for the device; call it once for many steps, on all their log-probs.
    """
    bad = (~torch.isfinite(logprobs)).nonzero()
    if len(bad):
        fault = f"logits are NaN, +inf or all -inf ({len(bad)} of {len(logprobs)} rows)"
        remedy = "Resume an earlier checkpoint with a lower update.learning_rate; in bfloat16 try model.dtype: float32."
        raise RunError(f"{row_name(int(bad[0, 0]))}: {fault}.  {remedy}")
