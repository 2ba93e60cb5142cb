"""Attention of one padded call, as each kind of layer makes it of its scores."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How a layer turns scores into shares: softmax(mask(c · tanh(s · q·kᵀ / c))), or without c of mask(s · q·kᵀ)."""

    window: int | None = None
    """A query sees this many tokens, itself the last of them; None is all before it."""
    scale: float | None = None
    """s; None is 1/√width."""
    soft_cap: float | None = None
    """c, the bound of scores.  Gemma Team 2024, arXiv:2408.00118, §2."""


PLAIN = AttentionKind()
"""Scaled dot products with every token before."""


def attend(
    query: Float[Tensor, "row heads queries width"],
    key: Float[Tensor, "row kv_heads keys width"],
    value: Float[Tensor, "row kv_heads keys width"],
    mask: Bool[Tensor, "#row 1 queries keys"] | None,
    kind: AttentionKind = PLAIN,
) -> Float[Tensor, "row heads queries width"]:
    """Grouped-query attention, softmax(s · q·kᵀ)·v; without a mask it is causal.  A window must be in the mask."""
    if kind.soft_cap is not None:
        return _attend_with_cap(query, key, value, mask, kind)
    if mask is not None and query.is_cuda:
        # CUDA's kernels for grouped heads take no mask; the one that remains would keep all scores.
        key, value = (repeated_heads(kv, query.shape[1]) for kv in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=kind.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_with_cap(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kind: AttentionKind
) -> Float[Tensor, "row heads queries width"]:
    """The same with capped scores, which no fused kernel makes.  All of them are kept for the backward pass, twice."""
    rows, heads, queries, width = query.shape
    if mask is None:
        mask = causal_mask(queries, None, query.device)[None, None]
    scores = capped_scores(query.reshape(rows, key.shape[1], -1, width), key, kind)
    scores = scores.view(rows, key.shape[1], -1, queries, key.shape[2])  # [row kv_heads heads/kv_heads queries keys]
    return weighted(scores, ~mask.unsqueeze(2), value).view(rows, heads, queries, width)


def capped_scores(
    query: Float[Tensor, "row kv_heads queries width"],
    key: Float[Tensor, "row kv_heads keys width"],
    kind: AttentionKind,
) -> Float[Tensor, "row kv_heads queries keys"]:
    """s · q·kᵀ, softly capped where the kind says so."""
    scores = (query * (query.shape[-1] ** -0.5 if kind.scale is None else kind.scale)) @ key.transpose(2, 3)
    return scores if kind.soft_cap is None else (scores / kind.soft_cap).tanh_() * kind.soft_cap


def weighted(
    scores: Float[Tensor, "row kv_heads each queries keys"],
    hidden_from: Bool[Tensor, "#row 1 1 queries keys"],
    value: Float[Tensor, "row kv_heads keys width"],
) -> Float[Tensor, "row kv_heads each_and_queries width"]:
    """softmax(masked scores)·v, the exponentials in float32 at least."""
    rows, kv_heads, _, _, keys = scores.shape
    precise = torch.promote_types(scores.dtype, torch.float32)
    shares = torch.softmax(scores.masked_fill_(hidden_from, -torch.inf), dim=-1, dtype=precise).to(value.dtype)
    return shares.view(rows, kv_heads, -1, keys) @ value


def causal_mask(length: int, window: int | None, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """Which tokens of its own sequence each one sees."""
    place = torch.arange(length, device=device)
    return in_sight(place[:, None], place, window)


def in_sight(query: Int64[Tensor, "*place"], key: Int64[Tensor, "*other"], window: int | None) -> Bool[Tensor, "*both"]:
    """Whether the token at a key's position is at or before a query's, and within the window."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def repeated_heads(
    kv: Float[Tensor, "row kv_heads keys width"], num_heads: int
) -> Float[Tensor, "row heads keys width"]:
    """Each head as many times in a row as there are query heads that share it."""
    return kv.repeat_interleave(num_heads // kv.shape[1], dim=1)
