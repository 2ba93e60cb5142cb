"""Many sequences on one token axis, and attention that keeps them apart.

A packed batch holds *roots* (whole sequences, or the prompts of groups) and *branches* (completions), each of which
continues one root.  A root is stored and computed once however many branches continue it.  Nothing is padded
except inside attention, where sequences of like length share a padded bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx

BUCKET_FILL = 0.75
"""A bucket takes sequences down to this share of its longest one."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that share one padded attention call."""

    members: tuple[int, ...]
    """Branches (or roots) in the bucket, longest first."""
    width: int
    """Length of the longest, in tokens; the others are padded to it."""
    mask: Bool[Tensor, "member 1 width keys"] | None
    """Which keys (the root's tokens, then the branch's own) each query sees; None means plain causal attention."""

    @property
    def num_slots(self) -> int:
        """Padded positions."""
        return len(self.members) * self.width


class PackedLayout:
    """Where each sequence lies on the packed token axis: all roots in order, then all branches in order.

    `branch_root[b]` is the root that branch b continues.  A branch may be empty.
    """

    def __init__(
        self, root_lengths: Sequence[int], branch_lengths: Sequence[int] = (), branch_root: Sequence[int] = ()
    ) -> None:
        self.root_lengths, self.branch_lengths = list(root_lengths), list(branch_lengths)
        self.branch_root = list(branch_root)
        self.num_root_tokens = sum(self.root_lengths)
        self.num_tokens = self.num_root_tokens + sum(self.branch_lengths)
        self.root_starts = _starts(self.root_lengths, 0)
        self.branch_starts = _starts(self.branch_lengths, self.num_root_tokens)
        self.root_buckets = [Bucket(members, width, None) for members, width in _like_lengths(self.root_lengths)]
        self.branch_buckets = [
            Bucket(members, width, self._branch_mask(members, width))
            for members, width in _like_lengths(self.branch_lengths)
        ]

    @cached_property
    def positions(self) -> Int64[Tensor, " token"]:
        """Position of each packed token in its own sequence, its root's tokens counted."""
        parts = [torch.arange(length) for length in self.root_lengths]
        for length, root in zip(self.branch_lengths, self.branch_root, strict=True):
            offset = self.root_lengths[root]
            parts.append(torch.arange(offset, offset + length))
        return torch.cat(parts)

    @cached_property
    def slots(self) -> tuple[Int64[Tensor, " slot"], Int64[Tensor, " token"]]:
        """Packed token of each padded slot of all buckets in order, and padded slot of each packed token.

        A padding slot repeats its sequence's first token: masked as a key, dropped as a query.
        """
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

    @cached_property
    def root_places(self) -> dict[int, tuple[int, int]]:
        """Root -> (its bucket, its row in that bucket)."""
        return {
            member: (index, row)
            for index, bucket in enumerate(self.root_buckets)
            for row, member in enumerate(bucket.members)
        }

    def _branch_mask(self, members: Sequence[int], width: int) -> Bool[Tensor, "member 1 width keys"]:
        root_lengths = torch.tensor([self.root_lengths[self.branch_root[member]] for member in members])
        longest = max(self.root_lengths)
        sees_root = torch.arange(longest) < root_lengths[:, None]  # [member longest]
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        return torch.cat(
            [
                sees_root[:, None, None, :].expand(-1, 1, width, -1),
                causal.expand(len(members), 1, width, width),
            ],
            dim=3,
        )

    def to(self, device: torch.device) -> "PackedLayout":
        """The layout with its index tensors on another device."""
        if device.type != "cpu":
            self.__dict__["positions"] = self.positions.to(device)
            self.__dict__["slots"] = tuple(index.to(device) for index in self.slots)
            self.branch_buckets = [
                Bucket(bucket.members, bucket.width, None if bucket.mask is None else bucket.mask.to(device))
                for bucket in self.branch_buckets
            ]
        return self


class _Rearrange(torch.autograd.Function):
    """x[index] whose gradient is a gather too: `inverse` gives each row of x the one place where it is used."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, inverse), None, None


class _Unpad(torch.autograd.Function):
    """Rows of padded slots back to packed tokens; padding receives a zero gradient."""

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

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "token heads width"],
        key: Float[Tensor, "token kv_heads width"],
        value: Float[Tensor, "token kv_heads width"],
    ) -> Float[Tensor, "token heads width"]:
        """Scaled dot-product attention, softmax(q·kᵀ/√width)·v, within each sequence of the layout."""
        layout = self.layout
        token_of_slot, slot_of_token = layout.slots
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[2]
        packed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)  # [token qkv]
        padded: Tensor = _Rearrange.apply(packed, token_of_slot, slot_of_token)  # type: ignore[no-untyped-call]
        buckets = [*layout.root_buckets, *layout.branch_buckets]
        parts = padded.split([bucket.num_slots for bucket in buckets])
        split_heads = [
            part.view(len(bucket.members), bucket.width, heads + 2 * kv_heads, width)
            .transpose(1, 2)
            .split([heads, kv_heads, kv_heads], dim=1)
            for bucket, part in zip(buckets, parts, strict=True)
        ]
        num_roots = len(layout.root_buckets)
        out = [attend(q, k, v, None) for q, k, v in split_heads[:num_roots]]
        if layout.branch_buckets:
            root_key, root_value = self._roots([kv[1:] for kv in split_heads[:num_roots]])
            for bucket, (q, k, v) in zip(layout.branch_buckets, split_heads[num_roots:], strict=True):
                roots = torch.tensor([layout.branch_root[member] for member in bucket.members], device=q.device)
                keys = torch.cat([root_key.index_select(0, roots), k], dim=2)
                values = torch.cat([root_value.index_select(0, roots), v], dim=2)
                out.append(attend(q, keys, values, bucket.mask))
        slots = torch.cat([o.transpose(1, 2).reshape(-1, heads * width) for o in out])
        packed_out: Tensor = _Unpad.apply(slots, slot_of_token)  # type: ignore[no-untyped-call]
        return packed_out.view(-1, heads, width)

    def _roots(self, keys_values: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Keys and values of all roots in order, padded to the longest."""
        longest = max(self.layout.root_lengths)
        order = [0] * len(self.layout.root_lengths)
        row = 0
        for bucket in self.layout.root_buckets:
            for member in bucket.members:
                order[member] = row
                row += 1
        index = torch.tensor(order, device=keys_values[0][0].device)
        keys, values = (
            torch.cat([F.pad(kv[which], (0, 0, 0, longest - kv[which].shape[2])) for kv in keys_values])
            for which in (0, 1)
        )
        return keys.index_select(0, index), values.index_select(0, index)


def attend(
    query: Float[Tensor, "row heads queries width"],
    key: Float[Tensor, "row kv_heads keys width"],
    value: Float[Tensor, "row kv_heads keys width"],
    mask: Bool[Tensor, "row 1 queries keys"] | None,
) -> Float[Tensor, "row heads queries width"]:
    """Grouped-query attention, softmax(q·kᵀ/√width)·v; without a mask it is causal."""
    if mask is not None and query.is_cuda:
        # CUDA's kernels for grouped heads take no mask; the one that remains would keep all scores.
        key, value = (kv.repeat_interleave(query.shape[1] // kv.shape[1], dim=1) for kv in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )


def _starts(lengths: Sequence[int], first: int) -> list[int]:
    starts, at = [], first
    for length in lengths:
        starts.append(at)
        at += length
    return starts


def _like_lengths(lengths: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Non-empty sequences in groups of like length, longest first: (members, longest length)."""
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        if buckets and lengths[i] >= BUCKET_FILL * lengths[buckets[-1][0]]:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return [(tuple(bucket), lengths[bucket[0]]) for bucket in buckets]
