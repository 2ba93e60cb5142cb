"""Cached keys and values of the rows that are being decoded: one slot a row, filled from the left."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.models.shared_prompt.attention import in_sight

BLOCK = 64
"""Slots grow by this many tokens at a time."""


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
        """A copy of one row, as `add` takes it, and the tokens that it holds."""
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
    """The least power of two that is at least this number."""
    return 1 << (number - 1).bit_length()
