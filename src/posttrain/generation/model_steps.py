"""Sampling through any causal model's own forward pass: its keys and values cached, or whole rows for every token.

The second way is right for every causal model, whatever state it keeps (convolutions, recurrences, compressed
attention), because its answer does not depend on what comes later.  It is slow: n tokens cost n passes over the row.

Cached rows end in one column (`AlignedSlots`).  The distance of two tokens is then that of their columns, so the
model's own masks are right whatever they are made of: windows, chunks, local attention, biases by distance.  Layers may
differ in heads and widths, keys from values.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer

from posttrain.generation.steps import BLOCK, PrefilledPrompts, Prompts, Steps
from posttrain.models.forward import next_logits
from posttrain.models.model_outputs import model_hidden
from posttrain.models.policy import Policy
from posttrain.models.transfers import numbers_on


class AlignedSlots:
    """Keys and values of the rows being decoded; rows come and go, and all grow by one column a step."""

    def __init__(self, *, block: int = BLOCK) -> None:
        self._block = block
        self._end = 0  # the column after the newest tokens
        self._storage: list[Tensor] = []  # keys and values of each layer in turn, [row heads capacity width]
        self._begin_at(torch.zeros(0, dtype=torch.long))

    def _begin_at(self, first: Int64[Tensor, " row"]) -> None:
        """Set the column of each row's first token, on the CPU and from there on the device."""
        self._first = first
        self._left = int(first.min()) if len(first) else self._end  # the first column that any row uses
        device = self._storage[0].device if self._storage else first.device
        self._first_there = first.to(device, non_blocking=True)

    @property
    def num_rows(self) -> int:
        return len(self._first)

    @property
    def num_layers(self) -> int:
        """Layers of the model's cache, including those that cache nothing."""
        return len(self._storage) // 2

    @property
    def lengths(self) -> Int64[Tensor, " row"]:
        return self._end - self._first_there

    @property
    def seen(self) -> int:
        """Columns that a step sees before its own."""
        return self._end - self._left

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"], prompts: Prompts = None) -> None:
        """Append rows of which `lengths` tokens are cached: keys and values of each layer in turn, padded on the right.

        Each is [row heads time width]; a layer that caches nothing has no heads.
        """
        device = cached[0].device
        if prompts is not None:
            rows = prompts.to(device, non_blocking=True)
            cached = [each.index_select(0, rows) for each in cached]
        before, longest = self.num_rows, int(lengths.max())
        self._make_room(before + len(lengths), longest, like=cached)
        self._begin_at(torch.cat([self._first, self._end - lengths]))
        # The last `longest` columns hold a row's tokens 0 - (longest - length) on; before its first there is padding.
        place = (torch.arange(longest) - (longest - lengths)[:, None]).to(device, non_blocking=True)
        for kept, new in zip(self._storage, cached, strict=True):
            index = place.clamp(min=0)[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            kept[before : self.num_rows, :, self._end - longest : self._end] = new.gather(2, index)

    def row(self, row: int) -> list[Tensor]:
        first = int(self._first[row])
        return [each[row : row + 1, :, first : self._end].clone() for each in self._storage]

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        if len(source):
            old, new = (each.to(self._first_there.device, non_blocking=True) for each in (source, target))
            for kept in self._storage:
                kept[new] = kept[old]
        self._begin_at(self._first.index_copy(0, target, self._first[source])[:num_left])

    def begin_step(self) -> Int64[Tensor, " row"]:
        if self._end == self._storage[0].shape[2]:
            self._make_room(self.num_rows, self.seen, like=self._storage)
        return self.lengths

    def end_step(self) -> None:
        self._end += 1

    def visible(self) -> Bool[Tensor, "row time"]:
        """Which columns hold a token of each row during a step, the one being written included."""
        return torch.arange(self._left, self._end + 1, device=self._first_there.device) >= self._first_there[:, None]

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
        self._first, self._end = self._first + (end - self._end), end
        self._begin_at(self._first)


class ModelSteps(Steps):
    """Sampling through the model's own forward and weights, with its own masks and explicit positions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def slots(self) -> AlignedSlots:
        return AlignedSlots()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts, padded on the right: causal attention then needs no mask."""
        tokens, lengths = _padded(prompts, self.policy.device)
        cache = DynamicCache()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(prompts), -1)
        hidden = self._hidden(tokens, positions, cache, None)
        ends = (lengths - 1).to(hidden.device, non_blocking=True)
        last = hidden[torch.arange(len(prompts), device=hidden.device), ends]
        cached = [each for layer in cache.layers for each in self._kept(layer, hidden)]
        return PrefilledPrompts(logits=self.policy.output_layer.logits(last), cached=cached, lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: AlignedSlots) -> Float[Tensor, "row vocab"]:
        positions, cache = slots.begin_step(), DynamicCache()
        cache.layers = [_SlotLayer(slots, index) for index in range(slots.num_layers)]
        hidden = self._hidden(tokens[:, None], positions[:, None], cache, slots.visible())
        slots.end_step()
        return self.policy.output_layer.logits(hidden[:, 0])

    def _hidden(self, tokens: Tensor, positions: Tensor, cache: Cache, visible: Tensor | None) -> Tensor:
        seen = {} if visible is None else {"attention_mask": visible.long()}
        policy = self.policy
        return model_hidden(
            policy.model, policy.compute_dtype, tokens, positions, past_key_values=cache, use_cache=True, **seen
        )

    def _kept(self, layer: object, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of prompts, under autocast in its type; none of a layer that reads another's."""
        assert isinstance(layer, DynamicLayer | DummyLayer)
        if layer.keys is None or layer.values is None:
            nothing = hidden.new_zeros(len(hidden), 0, hidden.shape[1], 1)
            return nothing, nothing
        if self.policy.compute_dtype == torch.bfloat16:
            return layer.keys.bfloat16(), layer.values.bfloat16()
        return layer.keys, layer.values


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts, padded on the right by their first token, and their lengths on the CPU."""
    time = max(map(len, prompts))
    tokens = torch.tensor([(*prompt, *(prompt[0],) * (time - len(prompt))) for prompt in prompts])
    return tokens.to(device, non_blocking=True), torch.tensor([len(prompt) for prompt in prompts])


class _SlotLayer(DynamicLayer):
    """One layer of the slots during one step, behind the interface that Hugging Face models cache through."""

    def __init__(self, slots: AlignedSlots, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots, self.index, self.is_initialized = slots, index, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store one token a row, [row kv_heads 1 width]; returns all that the layer sees."""
        return self.slots.write(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.slots.seen


CHUNK_TOKENS = 16384
"""Tokens that go through the model at a time, padding included."""


class RowTokens:
    """The tokens of the rows being decoded, in place of a cache."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"], prompts: Prompts = None) -> None:
        """Append rows of which `lengths` tokens are known, padded on the right."""
        tokens = cached[0] if prompts is None else cached[0].index_select(0, prompts)
        pairs = zip(tokens.tolist(), lengths.tolist(), strict=True)
        self.rows += [tuple(row[:length]) for row, length in pairs]

    def row(self, row: int) -> list[Tensor]:
        return [torch.tensor([self.rows[row]])]

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            self.rows[other] = self.rows[one]
        del self.rows[num_left:]


class RecomputedSteps(Steps):
    """Sampling through the policy's forward pass as training uses it, a token at a time."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def slots(self) -> RowTokens:
        return RowTokens()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        tokens, lengths = _padded(prompts, torch.device("cpu"))
        return PrefilledPrompts(logits=self._logits(prompts), cached=[tokens], lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: RowTokens) -> Float[Tensor, "row vocab"]:
        slots.rows = [(*row, token) for row, token in zip(slots.rows, tokens.tolist(), strict=True)]
        return self._logits(slots.rows)

    def _logits(self, rows: Sequence[Sequence[int]]) -> Float[Tensor, "row vocab"]:
        places, parts = [], []
        for chunk in chunks([len(row) for row in rows], CHUNK_TOKENS):
            # One completion a prompt, of a token that predicts nothing and is not read.
            parts.append(next_logits(self.policy.forward, [rows[place] for place in chunk], [(0,)] * len(chunk)))
            places += chunk
        logits = torch.cat(parts)
        return torch.empty_like(logits).index_copy_(0, numbers_on(logits.device, places), logits)


def chunks(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Places of rows of these lengths, the shortest first, in runs that go through the model together.

    Padded to its longest row, a run holds at most `max_tokens`, and no row more padding than tokens.  A longer row is
    its own run.
    """
    run: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place]):
        width = lengths[place]
        if run and (width * (len(run) + 1) > max_tokens or width > 2 * lengths[run[0]]):
            yield run
            run = []
        run.append(place)
    yield run
