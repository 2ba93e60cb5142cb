"""Cached keys and values of any model's layers, every row ending in the same column.

With the newest token of all rows in one column, the distance of two tokens is that of their columns, so the model's own
masks are right whatever they are made of: windows, chunks, local attention, biases by distance.  Layers may differ in
heads and widths, keys from values.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

BLOCK = 64
"""Room is made for this many tokens a row at a time."""


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
        """A copy of one row, as `add` takes it, and the tokens that it holds."""
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
        """Make room for one token a row; returns its position in each row."""
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
