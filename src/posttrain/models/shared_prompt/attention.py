"""Attention over padded calls, and over many sequences packed on one token axis.

A packed batch holds *roots* (whole sequences, or the prompts of groups) and *branches* (completions), each of which
continues one root.  A root is stored and computed once for all its branches.  Only attention pads: there sequences of
similar length share a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx

from posttrain.models.transfers import numbers_on


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How a layer turns scores into shares: softmax(mask(c · tanh(s · q·kᵀ / c))), or without c of mask(s · q·kᵀ)."""

    window: int | None = None
    """A query sees this many tokens, including itself; None means all before it."""
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
    rows, heads, queries, width = query.shape
    if kind.soft_cap is None:
        if mask is not None and query.is_cuda:
            # CUDA's kernels for grouped heads support no mask; the remaining one would keep all scores.
            key, value = (repeated_heads(kv, heads) for kv in (key, value))
        causal, grouped = mask is None, heads != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=kind.scale, enable_gqa=grouped
        )
    # There is no fused kernel for capped scores: all are kept for the backward pass, twice.
    if mask is None:
        mask = causal_mask(queries, None, query.device)[None, None]
    scores = capped_scores(query.reshape(rows, key.shape[1], -1, width), key, kind)
    scores = scores.view(rows, key.shape[1], -1, queries, key.shape[2])  # [row kv_heads heads/kv_heads queries keys]
    precise = torch.promote_types(scores.dtype, torch.float32)
    shares = torch.softmax(scores.masked_fill_(~mask.unsqueeze(2), -torch.inf), dim=-1, dtype=precise).to(value.dtype)
    return (shares.view(rows, key.shape[1], -1, key.shape[2]) @ value).view(rows, heads, queries, width)


def capped_scores(
    query: Float[Tensor, "row kv_heads queries width"],
    key: Float[Tensor, "row kv_heads keys width"],
    kind: AttentionKind,
) -> Float[Tensor, "row kv_heads queries keys"]:
    """s · q·kᵀ, softly capped if the kind has a cap."""
    scores = (query * (query.shape[-1] ** -0.5 if kind.scale is None else kind.scale)) @ key.transpose(2, 3)
    return scores if kind.soft_cap is None else (scores / kind.soft_cap).tanh_() * kind.soft_cap


def causal_mask(length: int, window: int | None, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """Which tokens of its sequence each one sees."""
    place = torch.arange(length, device=device)
    return in_sight(place[:, None], place, window)


def in_sight(query: Int64[Tensor, "*place"], key: Int64[Tensor, "*other"], window: int | None) -> Bool[Tensor, "*both"]:
    """Whether the token at a key's position is at or before a query's, and within the window."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def repeated_heads(
    kv: Float[Tensor, "row kv_heads keys width"], num_heads: int
) -> Float[Tensor, "row heads keys width"]:
    """Each head repeated for every query head that shares it."""
    return kv.repeat_interleave(num_heads // kv.shape[1], dim=1)


BUCKET_FILL = 0.75
"""A bucket takes sequences down to this share of its longest one."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences that share one padded attention call."""

    members: tuple[int, ...]
    """Branches (or roots), longest first."""
    width: int
    """Length of the longest, in tokens; the others are padded to it."""

    @property
    def num_slots(self) -> int:
        return len(self.members) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchIndices:
    """Indices for attention of one bucket of branches."""

    roots: Int64[Tensor, " member"]
    """The root that each member continues."""
    sees_root: Bool[Tensor, "member longest"]
    """Which keys of its root, padded to the longest root, are tokens."""
    root_lengths: Int64[Tensor, " member"]
    """Position of each branch's first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIndices:
    """Indices for attention over a layout, on its device.

    A *slot* is a padded position; slots are numbered through all buckets, those of roots first.
    """

    positions: Int64[Tensor, " token"]
    """Position of each packed token in its sequence, with its root's tokens."""
    token_of_slot: Int64[Tensor, " slot"]
    """Packed token of each slot; a padding slot repeats its sequence's first: masked as a key, dropped as a query."""
    slot_of_token: Int64[Tensor, " token"]
    row_of_root: Int64[Tensor, " root"]
    """Row of each root among the rows of all root buckets."""
    branches: tuple[BranchIndices, ...]


class PackedLayout:
    """Where each sequence is on the packed token axis: all roots in order, then all branches in order.

    `branch_root[b]` is the root that branch b continues.  A branch may be empty.  With `round_to`, a sequence is padded
    to a multiple of it, and so the same way whatever the others are.
    """

    def __init__(
        self,
        root_lengths: Sequence[int],
        branch_lengths: Sequence[int] = (),
        branch_root: Sequence[int] = (),
        *,
        round_to: int = 1,
    ) -> None:
        self.root_lengths, self.branch_lengths = list(root_lengths), list(branch_lengths)
        self.branch_root = list(branch_root)
        assert all(self.root_lengths), "a root has at least one token"
        self.num_root_tokens = sum(self.root_lengths)
        self.num_tokens = self.num_root_tokens + sum(self.branch_lengths)
        self.root_starts = list(accumulate(self.root_lengths, initial=0))[:-1]
        self.branch_starts = list(accumulate(self.branch_lengths, initial=self.num_root_tokens))[:-1]
        whole = [
            length + self.root_lengths[root] for length, root in zip(self.branch_lengths, self.branch_root, strict=True)
        ]
        self.longest = max([*self.root_lengths, *whole])
        """Tokens of the longest sequence, a branch with its root."""
        self.root_buckets = _like_lengths(self.root_lengths, round_to)
        self.branch_buckets = _like_lengths(self.branch_lengths, round_to)

    def indices(self, device: torch.device) -> PackedIndices:
        token_of_slot, slot_of_token = self._slots()
        order = [member for bucket in self.root_buckets for member in bucket.members]
        parts, branches = [torch.arange(length) for length in self.root_lengths], []
        for length, root in zip(self.branch_lengths, self.branch_root, strict=True):
            parts.append(torch.arange(self.root_lengths[root], self.root_lengths[root] + length))
        for bucket in self.branch_buckets:
            roots = [self.branch_root[member] for member in bucket.members]
            lengths = torch.tensor([self.root_lengths[root] for root in roots])
            sees_root = torch.arange(max(self.root_lengths)) < lengths[:, None]
            branches.append(
                BranchIndices(
                    roots=numbers_on(device, roots),
                    sees_root=sees_root.to(device, non_blocking=True),
                    root_lengths=lengths.to(device, non_blocking=True),
                )
            )
        return PackedIndices(
            positions=torch.cat(parts).to(device, non_blocking=True),
            token_of_slot=token_of_slot.to(device, non_blocking=True),
            slot_of_token=slot_of_token.to(device, non_blocking=True),
            row_of_root=torch.tensor(order).argsort().to(device, non_blocking=True),
            branches=tuple(branches),
        )

    def _slots(self) -> tuple[Int64[Tensor, " slot"], Int64[Tensor, " token"]]:
        """Packed token of each slot, and slot of each packed token."""
        token_of_slot: list[Tensor] = []
        slot_of_token = torch.empty(self.num_tokens, dtype=torch.long)
        first_slot = 0
        for buckets, lengths, starts in (
            (self.root_buckets, self.root_lengths, self.root_starts),
            (self.branch_buckets, self.branch_lengths, self.branch_starts),
        ):
            for bucket in buckets:
                for member in bucket.members:
                    start, length = starts[member], lengths[member]
                    row = torch.full((bucket.width,), start)
                    row[:length] = torch.arange(start, start + length)
                    token_of_slot.append(row)
                    slot_of_token[start : start + length] = torch.arange(first_slot, first_slot + length)
                    first_slot += bucket.width
        return torch.cat(token_of_slot), slot_of_token

    def masks(self, indices: PackedIndices, window: int | None) -> list[Bool[Tensor, "_ 1 _ _"] | None]:
        """Which keys each query sees, by bucket: of roots, None if all tokens before are seen; then of branches.

        [1, 1, width, width] or [member, 1, width, keys] each; a branch's keys are its root's tokens, then its own.
        """
        device, masks = indices.positions.device, []
        for bucket in self.root_buckets:
            mask = None
            if window is not None and bucket.width > window:
                mask = causal_mask(bucket.width, window, device)[None, None]
            masks.append(mask)
        for bucket, branch in zip(self.branch_buckets, indices.branches, strict=True):
            members, longest = branch.sees_root.shape
            to_root = branch.sees_root[:, None, :].expand(-1, bucket.width, -1)
            if window is not None:
                queries = branch.root_lengths[:, None] + torch.arange(bucket.width, device=device)  # [member width]
                to_root = to_root & in_sight(queries[:, :, None], torch.arange(longest, device=device), window)
            own = causal_mask(bucket.width, window, device).expand(members, -1, -1)
            masks.append(torch.cat([to_root, own], dim=2)[:, None])
        return masks


class _Rearrange(torch.autograd.Function):
    """x[index] whose gradient is also a gather: `inverse` gives the one place where each row of x is used."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, inverse), None, None


class _Unpad(torch.autograd.Function):
    """Rows of padded slots back to packed tokens; padding gets a zero gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        ctx.num_slots = x.shape[0]  # type: ignore[attr-defined]
        return x.index_select(0, slot_of_token)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (slot_of_token,) = ctx.saved_tensors  # type: ignore[attr-defined]
        padded = grad.new_zeros(ctx.num_slots, grad.shape[1])  # type: ignore[attr-defined]
        return padded.index_copy_(0, slot_of_token, grad), None


class PackedAttention:
    """Causal attention inside each root, and of each branch over its root and itself."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self.layout, self.indices = layout, layout.indices(device)
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def __call__(
        self,
        layer: int,
        kind: AttentionKind,
        query: Float[Tensor, "token heads width"],
        key: Float[Tensor, "token kv_heads width"],
        value: Float[Tensor, "token kv_heads width"],
    ) -> Float[Tensor, "token heads width"]:
        layout, at = self.layout, self.indices
        window = None if kind.window is None or kind.window >= layout.longest else kind.window
        if window not in self._masks:  # once for all layers of a window
            self._masks[window] = layout.masks(at, window)
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[2]
        packed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)  # [token qkv]
        padded: Tensor = _Rearrange.apply(packed, at.token_of_slot, at.slot_of_token)  # type: ignore[no-untyped-call]
        buckets = [*layout.root_buckets, *layout.branch_buckets]
        parts = padded.split([bucket.num_slots for bucket in buckets])
        split_heads = [
            part.view(len(bucket.members), bucket.width, heads + 2 * kv_heads, width)
            .transpose(1, 2)
            .split([heads, kv_heads, kv_heads], dim=1)
            for bucket, part in zip(buckets, parts, strict=True)
        ]
        masked = list(zip(split_heads, self._masks[window], strict=True))
        num_roots, longest = len(layout.root_buckets), max(layout.root_lengths)
        out = [attend(q, k, v, mask, kind) for (q, k, v), mask in masked[:num_roots]]
        if layout.branch_buckets:
            root_key, root_value = (  # of all roots in order, padded to the longest
                torch.cat(
                    [F.pad(part[which], (0, 0, 0, longest - part[which].shape[2])) for part, _ in masked[:num_roots]]
                ).index_select(0, at.row_of_root)
                for which in (1, 2)
            )
            for ((q, k, v), mask), branch in zip(masked[num_roots:], at.branches, strict=True):
                keys = torch.cat([root_key.index_select(0, branch.roots), k], dim=2)
                values = torch.cat([root_value.index_select(0, branch.roots), v], dim=2)
                out.append(attend(q, keys, values, mask, kind))
        slots = torch.cat([o.transpose(1, 2).reshape(-1, heads * width) for o in out])
        packed_out: Tensor = _Unpad.apply(slots, at.slot_of_token)  # type: ignore[no-untyped-call]
        return packed_out.view(-1, heads, width)


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _like_lengths(lengths: Sequence[int], round_to: int) -> list[Bucket]:
    """Non-empty sequences in groups of similar length, longest first; if rounded, of equal rounded length."""
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    buckets: list[tuple[int, list[int]]] = []
    for i in order:
        width = rounded_up(lengths[i], round_to)
        if buckets and width >= (BUCKET_FILL if round_to == 1 else 1) * buckets[-1][0]:
            buckets[-1][1].append(i)
        else:
            buckets.append((width, [i]))
    return [Bucket(tuple(members), width) for width, members in buckets]
