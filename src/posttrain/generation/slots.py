"""Forward passes of sampling (`Steps`), and the cached keys and values of the rows that are being decoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.models.shared_prompt.attention import in_sight

BLOCK = 64
"""Slots grow by this many tokens at a time."""


@dataclass(frozen=True, slots=True)
class PrefilledPrompts:
    """Prefilled prompts, from which completions start."""

    logits: Float[Tensor, "prompt vocab"]
    cached: Sequence[Tensor]
    """The cache, one row a prompt, padded on the right; `Slots` knows its tensors."""
    lengths: Int64[Tensor, " prompt"]


@runtime_checkable
class Slots(Protocol):
    """The cache of the rows being decoded; rows come and go, the others stay in place."""

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"]) -> None:
        """Append rows of `lengths` tokens from the cache of prompts; later columns are padding."""

    def row(self, row: int) -> tuple[list[Tensor], int]:
        """A copy of one row, as `add` takes it, and the tokens that it holds."""

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        """Copy rows over finished ones and drop all behind `num_left`."""


@runtime_checkable
class Steps(Protocol):
    """A model's forward pass, seen from the sampler."""

    def refresh(self) -> None:
        """Read the policy's weights anew; called before every sampling."""
        return

    def release(self) -> None:
        """Free what only a sampling needs; called after it."""
        return

    def slots(self) -> Slots:
        """An empty cache for one sampling."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts."""

    def step(self, tokens: Int64[Tensor, " row"], slots: Any) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row; logits of the next."""


class KeyValueSlots:
    """Keys and values of all layers for up to `capacity` tokens a row; rows come and go, the rest stay in place."""

    def __init__(self, *, block: int = BLOCK, round_rows: bool = False) -> None:
        """Room grows by `block` tokens a row; with `round_rows`, rows come in powers of two and room never shrinks."""
        self._block, self._round_rows = block, round_rows
        self.lengths = torch.zeros(0, dtype=torch.long)
        """Tokens that each row holds."""
        self.layers: list[Tensor] = []
        """All that is allocated, unused rows and columns included: of each layer [two row kv_heads capacity width].

        The list object stays when room grows, so that nobody holds an outgrown layer.
        """
        self.times_moved = 0
        """How often storage was reallocated; between two of those every layer stays at its address."""
        self._width = 0  # longest row, the token being written included

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and tokens of each, that are allocated."""
        return (self.layers[0].shape[1], self.layers[0].shape[3]) if self.layers else (0, 0)

    def clear(self) -> None:
        self.lengths = self.lengths[:0]

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"]) -> None:
        """Append rows whose first `lengths` tokens are cached already; later columns are padding.

        All layers are one tensor, [row two layer kv_heads time width].
        """
        (rows_first,) = cached
        before = self.num_rows
        self.lengths = torch.cat([self.lengths.to(lengths.device), lengths])
        longest = int(self.lengths.max())
        _, two, num_layers, kv_heads, _, width = rows_first.shape
        if not self.layers:
            self.layers += [rows_first.new_empty(two, 0, kv_heads, 0, width) for _ in range(num_layers)]
        self._reserve(longest + 1)
        kept = rows_first[:, :, :, :, :longest]  # padding is as wide as the longest prompt of a prefill, added or not
        for layer, new in zip(self.layers, kept.unbind(2), strict=True):
            layer[:, before : self.num_rows, :, : kept.shape[4]] = new.movedim(0, 1)

    def row(self, row: int) -> tuple[list[Tensor], int]:
        length = int(self.lengths[row])
        return [torch.stack([layer[:, row, :, :length] for layer in self.layers], dim=1)[None]], length

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        if len(source):
            for layer in self.layers:
                layer[:, target] = layer[:, source]
            self.lengths[target] = self.lengths[source]
        self.lengths = self.lengths[:num_left]

    def begin_step(self) -> Int64[Tensor, " row"]:
        """Make room for one token a row; returns its position in each row."""
        self._width = int(self.lengths.max()) + 1
        self._reserve(self._width)
        self._rows = torch.arange(self.num_rows, device=self.lengths.device)
        return self.lengths

    def end_step(self) -> None:
        self.lengths = self.lengths + 1

    def visible(self, window: int | None = None) -> Bool[Tensor, "row time"]:
        """Which cached tokens each row sees during a step: its last `window`, or all, with the one being written."""
        return in_sight(self.lengths[:, None], torch.arange(self._width, device=self.lengths.device), window)

    def write(
        self, layer: int, key: Float[Tensor, "row kv_heads width"], value: Float[Tensor, "row kv_heads width"]
    ) -> tuple[Float[Tensor, "row kv_heads time width"], Float[Tensor, "row kv_heads time width"]]:
        """Store one token a row in one layer; returns that layer's keys and values up to it."""
        keys, values = self.layers[layer][:, : self.num_rows].unbind(0)
        keys[self._rows, :, self.lengths] = key
        values[self._rows, :, self.lengths] = value
        return keys[:, :, : self._width], values[:, :, : self._width]

    def _reserve(self, time: int) -> None:
        """Room for `time` tokens of every row in use: a layer at a time, so that only one is ever held twice."""
        old_rows, old_capacity = self.room
        if old_rows >= self.num_rows and old_capacity >= time:
            return
        rows = max(self.num_rows, min(old_rows, 2 * self.num_rows))
        capacity = (time + self._block - 1) // self._block * self._block
        if self._round_rows:  # room that is never given back comes to stay at one address
            rows, capacity = max(power_of_two(self.num_rows), old_rows), max(capacity, old_capacity)
        kept, seen = min(rows, old_rows), min(capacity, old_capacity)
        for index, old in enumerate(self.layers):
            two, _, kv_heads, _, width = old.shape
            # Zeros, not empty: padding is masked, but 0 · NaN is NaN.
            self.layers[index] = old.new_zeros(two, rows, kv_heads, capacity, width)
            self.layers[index][:, :kept, :, :seen] = old[:, :kept, :, :seen]
        self.times_moved += 1


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class AlignedSlots:
    """Keys and values of the rows being decoded; rows come and go, and all grow by one column a step."""

    def __init__(self, *, block: int = BLOCK) -> None:
        self._block = block
        self._first = torch.zeros(0, dtype=torch.long)  # column of each row's first token
        self._end = 0  # the column behind the newest tokens
        self._left = 0  # the first column that any row uses
        self._storage: list[Tensor] = []  # keys and values of each layer in turn, [row heads capacity width]

    @property
    def num_rows(self) -> int:
        return len(self._first)

    @property
    def num_layers(self) -> int:
        """Layers that the model's cache has, those included that cache nothing."""
        return len(self._storage) // 2

    @property
    def lengths(self) -> Int64[Tensor, " row"]:
        return self._end - self._first

    @property
    def seen(self) -> int:
        """Columns that a step sees before its own."""
        return self._end - self._left

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"]) -> None:
        """Append rows of which `lengths` tokens are cached: keys and values of each layer in turn, padded on the right.

        Each is [row heads time width]; a layer that caches nothing has no heads.
        """
        before, longest = self.num_rows, int(lengths.max())
        self._make_room(before + len(lengths), longest, like=cached)
        self._first = torch.cat([self._first.to(lengths.device), self._end - lengths])
        self._left = int(self._first.min())
        # The last `longest` columns hold a row's tokens 0 - (longest - length) on; before its first there is padding.
        place = torch.arange(longest, device=lengths.device) - (longest - lengths)[:, None]
        for kept, new in zip(self._storage, cached, strict=True):
            index = place.clamp(min=0)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            kept[before : self.num_rows, :, self._end - longest : self._end] = new.gather(2, index)

    def row(self, row: int) -> tuple[list[Tensor], int]:
        first = int(self._first[row])
        return [each[row : row + 1, :, first : self._end].clone() for each in self._storage], self._end - first

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        if len(source):
            for kept in self._storage:
                kept[target] = kept[source]
            self._first[target] = self._first[source]
        self._first = self._first[:num_left]
        self._left = int(self._first.min()) if num_left else self._end

    def begin_step(self) -> Int64[Tensor, " row"]:
        if self._end == self._storage[0].shape[2]:
            self._make_room(self.num_rows, self.seen, like=self._storage)
        return self.lengths

    def end_step(self) -> None:
        self._end += 1

    def visible(self) -> Bool[Tensor, "row time"]:
        """Which columns hold a token of each row during a step, the one being written included."""
        return torch.arange(self._left, self._end + 1, device=self._first.device) >= self._first[:, None]

    def write(
        self, layer: int, key: Float[Tensor, "row keys 1 key_width"], value: Float[Tensor, "row values 1 value_width"]
    ) -> tuple[Float[Tensor, "row keys time key_width"], Float[Tensor, "row values time value_width"]]:
        """Store one token a row in one layer, in the type of what is cached; returns that layer's keys and values."""
        both = []
        for kept, new in zip(self._storage[2 * layer : 2 * layer + 2], (key, value), strict=True):
            kept[: self.num_rows, :, self._end : self._end + 1] = new
            both.append(kept[: self.num_rows, :, self._left : self._end + 1])
        return both[0], both[1]

    def _make_room(self, rows: int, columns: int, like: Sequence[Tensor]) -> None:
        """Room for this many rows and cached columns, one more to write to, and some to grow into.

        Reallocation drops columns that no row uses.
        """
        old, used = self._storage, self.seen if self.num_rows else 0
        if old and len(old[0]) >= rows and self._end >= columns and self._end < old[0].shape[2]:
            return
        end = max(used, columns)
        capacity = (end // self._block + 2) * self._block
        rows = max(rows, min(len(old[0]), 2 * rows)) if old else rows
        for index, each in enumerate(like):
            # Zeros, not empty: padding is masked, but 0 · NaN is NaN.
            room = each.new_zeros(rows, each.shape[1], capacity, each.shape[3])
            if used:
                kept = min(rows, len(old[index]))
                room[:kept, :, end - used : end] = old[index][:kept, :, self._left : self._end]
            if old:
                old[index] = room
            else:
                self._storage = [*self._storage, room]
        self._first, self._left, self._end = self._first + (end - self._end), end - used, end
