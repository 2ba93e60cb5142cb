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
        self._cached: Tensor | None = None  # [2 layer row kv_heads capacity width]
        self._width = 0  # longest row, the token being written included

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self.lengths)

    @property
    def storage(self) -> Float[Tensor, "two layer row kv_heads capacity width"]:
        """All that is allocated, unused rows and columns included."""
        assert self._cached is not None
        return self._cached

    def clear(self) -> None:
        """Let go of all rows and keep the room."""
        self.lengths = self.lengths[:0]

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"]) -> None:
        """Append rows whose first `lengths` tokens are cached already; later columns are padding.

        All layers are one tensor, [row two layer kv_heads time width].
        """
        (rows_first,) = cached
        self._add(rows_first.movedim(0, 2), lengths)

    def _add(self, cached: Float[Tensor, "two layer row kv_heads time width"], lengths: Int64[Tensor, " row"]) -> None:
        before = self.num_rows
        self.lengths = torch.cat([self.lengths.to(lengths.device), lengths])
        longest = int(self.lengths.max())
        self._reserve(longest + 1, like=cached)
        assert self._cached is not None
        kept = cached[:, :, :, :, :longest]  # padding is as wide as the longest prompt of a prefill, added or not
        self._cached[:, :, before : self.num_rows, :, : kept.shape[4]] = kept

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        """Copy rows over finished ones and let go of all behind `num_left`."""
        assert self._cached is not None
        if len(source):
            self._cached[:, :, target] = self._cached[:, :, source]
            self.lengths[target] = self.lengths[source]
        self.lengths = self.lengths[:num_left]

    def begin_step(self) -> Int64[Tensor, " row"]:
        """Make room for one token a row; returns its position in each row."""
        self._width = int(self.lengths.max()) + 1
        self._reserve(self._width, like=self._cached)
        self._rows = torch.arange(self.num_rows, device=self.lengths.device)
        return self.lengths

    def end_step(self) -> None:
        """Count the token that every layer has written."""
        self.lengths = self.lengths + 1

    def visible(self, window: int | None = None) -> Bool[Tensor, "row time"]:
        """Which cached tokens each row sees during a step: its last `window`, or all, with the one being written."""
        return in_sight(self.lengths[:, None], torch.arange(self._width, device=self.lengths.device), window)

    def write(
        self, layer: int, key: Float[Tensor, "row kv_heads width"], value: Float[Tensor, "row kv_heads width"]
    ) -> tuple[Float[Tensor, "row kv_heads time width"], Float[Tensor, "row kv_heads time width"]]:
        """Store one token a row in one layer; returns that layer's keys and values up to it."""
        assert self._cached is not None
        keys, values = self._cached[0, layer, : self.num_rows], self._cached[1, layer, : self.num_rows]
        keys[self._rows, :, self.lengths] = key
        values[self._rows, :, self.lengths] = value
        return keys[:, :, : self._width], values[:, :, : self._width]

    def _reserve(self, time: int, like: Tensor | None) -> None:
        assert like is not None
        old = self._cached
        if old is not None and old.shape[2] >= self.num_rows and old.shape[4] >= time:
            return
        rows = self.num_rows if old is None else max(self.num_rows, min(old.shape[2], 2 * self.num_rows))
        capacity = (time + self._block - 1) // self._block * self._block
        if self._round_rows:
            rows = power_of_two(self.num_rows)
            if old is not None:  # room that is never given back comes to stay at one address
                rows, capacity = max(rows, old.shape[2]), max(capacity, old.shape[4])
        two, layers, _, kv_heads, _, width = like.shape
        # Zeros, not empty: padding is masked, but 0 · NaN is NaN.
        self._cached = like.new_zeros(two, layers, rows, kv_heads, capacity, width)
        if old is not None:
            kept, seen = min(rows, old.shape[2]), min(capacity, old.shape[4])
            self._cached[:, :, :kept, :, :seen] = old[:, :, :kept, :, :seen]


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
