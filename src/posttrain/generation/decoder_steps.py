"""Sampling through the decoder of the shared-prompt forward pass.

On a GPU, steps have fixed shapes, which are replayed as one graph instead of launching every operation.  A step is
padded to a power of two of rows and to a multiple of `GRAPH_BLOCK` cached tokens.  Its inputs are copied to fixed
addresses, and each shape is captured once.  Weights, cache and inputs keep their addresses from rollout to rollout.  On
a CPU the same padded step runs without capture, which is how the tests reach it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.generation.steps import BLOCK, PrefilledPrompts, Prompts, Steps
from posttrain.models.forward import SharedPromptForward
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt import attention as attentions
from posttrain.models.shared_prompt.attention import AttentionKind
from posttrain.models.shared_prompt.decoder import Attend, DecoderLayer, Positions
from posttrain.models.shared_prompt.linear import Matrix, for_inference, linear
from posttrain.models.transfers import numbers_on

ROUND_TO = 32
"""Tokens that a step or a prefill attends to are a multiple of this.  The bits of a row's result then do not depend on
the other rows: kernels add a few terms at the end in another order."""
GRAPH_BLOCK = 256
"""Cached tokens that a captured step attends to are a multiple of this."""


class RowLengths:
    """Tokens of each row, on the CPU and on the device.  Both are counted, so neither asks the other."""

    def __init__(self) -> None:
        self.known = self.there = torch.zeros(0, dtype=torch.long)

    def put(self, lengths: Int64[Tensor, " row"], device: torch.device) -> None:
        self.known, self.there = lengths, lengths.to(device, non_blocking=True)

    def grow(self) -> None:
        """One more token in every row."""
        both_on_cpu = self.there.device.type == "cpu"
        self.known = self.known + 1
        self.there = self.known if both_on_cpu else self.there + 1


class KeyValueSlots:
    """Keys and values of all layers for up to `capacity` tokens a row; rows come and go, the rest stay in place."""

    def __init__(self, *, block: int = BLOCK, round_rows: bool = False) -> None:
        """Room grows by `block` tokens a row; with `round_rows`, rows come in powers of two and room never shrinks."""
        self._block, self._round_rows = block, round_rows
        self._lengths = RowLengths()
        self.layers: list[Tensor] = []
        """All allocated storage, unused rows and columns included, [two row kv_heads capacity width] for each layer.

        The list object stays the same when room grows, so no caller holds an old layer.
        """
        self.times_moved = 0
        """How often storage was reallocated; between two reallocations every layer stays at its address."""
        self._width = 0  # of a step: the longest row with the token being written, rounded up

    @property
    def num_rows(self) -> int:
        return len(self._lengths.known)

    @property
    def lengths(self) -> Int64[Tensor, " row"]:
        """Tokens that each row holds, on the device."""
        return self._lengths.there

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self._lengths.known.max())

    @property
    def room(self) -> tuple[int, int]:
        """Allocated rows, and tokens of each."""
        return (self.layers[0].shape[1], self.layers[0].shape[3]) if self.layers else (0, 0)

    def clear(self) -> None:
        self._lengths = RowLengths()

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"], prompts: Prompts = None) -> None:
        """Append rows whose first `lengths` tokens are cached already; later columns are padding.

        All layers are one tensor, [prompt two layer kv_heads time width].
        """
        rows_first, device, before = cached[0], cached[0].device, self.num_rows
        if prompts is not None:
            rows_first = rows_first.index_select(0, prompts.to(device, non_blocking=True))
        self._lengths.put(torch.cat([self._lengths.known, lengths]), device)
        longest = self.longest
        _, two, num_layers, kv_heads, _, width = rows_first.shape
        if not self.layers:
            self.layers += [rows_first.new_empty(two, 0, kv_heads, 0, width) for _ in range(num_layers)]
        self._reserve(longest + 1)
        kept = rows_first[:, :, :, :, :longest]  # padding is as wide as the longest prompt of a prefill, added or not
        for layer, new in zip(self.layers, kept.unbind(2), strict=True):
            layer[:, before : self.num_rows, :, : kept.shape[4]] = new.movedim(0, 1)

    def row(self, row: int) -> list[Tensor]:
        length = int(self._lengths.known[row])
        return [torch.stack([layer[:, row, :, :length] for layer in self.layers], dim=1)[None]]

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        known, device = self._lengths.known, self.lengths.device
        if len(source):
            old, new = (each.to(device, non_blocking=True) for each in (source, target))
            for layer in self.layers:
                layer[:, new] = layer[:, old]
        self._lengths.put(known.index_copy(0, target, known[source])[:num_left], device)

    def begin_step(self) -> Int64[Tensor, " row"]:
        """Make room for one token a row; returns its position in each row."""
        self._width = attentions.rounded_up(self.longest + 1, min(ROUND_TO, self._block))
        self._reserve(self._width)
        self._rows = torch.arange(self.num_rows, device=self.lengths.device)
        return self.lengths

    def end_step(self) -> None:
        self._lengths.grow()

    def visible(self, window: int | None = None) -> Bool[Tensor, "row time"]:
        """Which cached tokens each row sees during a step: its last `window`, or all, with the one being written."""
        return attentions.in_sight(self.lengths[:, None], torch.arange(self._width, device=self.lengths.device), window)

    def hides(self, window: int | None = None) -> bool:
        """Whether there is a cached column that some row does not see during a step."""
        shortest = int(self._lengths.known.min())
        return shortest + 1 < self._width or (window is not None and self.longest >= window)

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
        if self._round_rows:  # room that is never given back stays at one address after a while
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


class DecoderSteps(Steps):
    """Sampling through the shared-prompt decoder, with every layer's weights prepared once for a sampling."""

    def __init__(self, policy: Policy) -> None:
        assert isinstance(policy.forward, SharedPromptForward)
        self.policy, self.decoder, self.device = policy, policy.forward.decoder, policy.device
        self.layers: list[DecoderLayer] = []
        self.output_layer = policy.output_layer
        self.head: Matrix = self.output_layer.matrix
        where = torch.arange(policy.max_positions, device=self.device)
        self.positions = Positions(self.decoder.angles(where), self.decoder.position_rows())

    @torch.no_grad()
    def refresh(self) -> None:
        self.layers = [self.decoder.layer(index).for_inference() for index in range(self.decoder.num_layers)]
        self.positions = replace(self.positions, rows=self.decoder.position_rows())
        self.output_layer = self.policy.output_layer
        self.head = for_inference(self.output_layer.matrix)

    def release(self) -> None:
        self.layers, self.output_layer = [], self.policy.output_layer
        self.head = self.output_layer.matrix

    def slots(self) -> KeyValueSlots:
        return KeyValueSlots()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts, packed without padding."""
        layout = attentions.PackedLayout([len(prompt) for prompt in prompts], round_to=ROUND_TO)
        attention = attentions.PackedAttention(layout, self.device)
        kept: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept.append((key, value))
            return attention(layer, kind, query, key, value)

        tokens = numbers_on(self.device, [token for prompt in prompts for token in prompt])
        starts, lengths = torch.tensor(layout.root_starts), torch.tensor(layout.root_lengths)
        last = (starts + lengths - 1).to(self.device, non_blocking=True)
        logits = self.logits(tokens, attention.indices.positions, attend, wanted=last)
        time = torch.arange(max(layout.root_lengths))
        index = starts[:, None] + torch.minimum(time, lengths[:, None] - 1)  # [prompt time]
        index = index.to(self.device, non_blocking=True)
        stacked = torch.stack([torch.stack([kv[which] for kv in kept]) for which in (0, 1)])
        padded = stacked[:, :, index].transpose(3, 4).movedim(2, 0)  # [prompt two layer kv_heads time width]
        return PrefilledPrompts(logits=logits, cached=[padded], lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        @cache
        def hidden_from(window: int | None) -> Tensor | None:
            return ~slots.visible(window) if slots.hides(window) else None

        def attend(layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = slots.write(layer, key, value)
            return attend_to_cache(query, keys, values, hidden_from(kind.window), kind)

        logits = self.logits(tokens, slots.begin_step(), attend)
        slots.end_step()
        return logits

    def logits(
        self, tokens: Tensor, positions: Int64[Tensor, " token"], attend: Attend, wanted: Tensor | None = None
    ) -> Float[Tensor, "row vocab"]:
        """Logits after the wanted tokens, or after all."""
        hidden = self.decoder.run(tokens, self.positions.at(positions), attend, self.layers, wanted)
        return self.output_layer.of_products(linear(hidden.to(self.policy.compute_dtype), self.head))


def attend_to_cache(
    query: Float[Tensor, "row heads width"],
    keys: Float[Tensor, "row kv_heads time width"],
    values: Float[Tensor, "row kv_heads time width"],
    hidden_from: Bool[Tensor, "row time"] | None,
    kind: AttentionKind,
) -> Float[Tensor, "row heads width"]:
    """softmax(masked scores)·v of one query a row.

    Written as two batched products: with a single query they are faster on a CPU than the fused kernel.
    """
    rows, heads, width = query.shape
    scores = attentions.capped_scores(query.view(rows, keys.shape[1], -1, width), keys, kind)
    if hidden_from is not None:
        scores = scores.masked_fill_(hidden_from[:, None, None, :], -torch.inf)
    return (torch.softmax(scores, dim=-1) @ values).view(rows, heads, width)


class StaticSteps(DecoderSteps):
    """Sampling through the shared-prompt decoder in steps of fixed shapes."""

    head: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.prepare = captured if policy.device.type == "cuda" else lambda compute: compute
        self.layers = [self.decoder.layer(index).owned() for index in range(self.decoder.num_layers)]
        self.output_layer = policy.output_layer.copy()
        self.head = self.output_layer.matrix
        self._slots: list[KeyValueSlots] = []
        self._in_use = 0
        self._steps: dict[tuple[int, int, int, int], _StaticStep] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.take_over(self.decoder.layer(index))
        self.output_layer.take_over(self.policy.output_layer)

    def release(self) -> None:
        """Keep one cache, with its captured steps, which read the weights where they are."""
        self._in_use = 0
        del self._slots[1:]
        first = {id(each) for each in self._slots}
        self._steps = {key: step for key, step in self._steps.items() if key[0] in first}

    def slots(self) -> KeyValueSlots:
        """An empty cache: that of an earlier sampling, unless it is still in use."""
        if self._in_use == len(self._slots):
            self._slots.append(KeyValueSlots(block=GRAPH_BLOCK, round_rows=True))
        slots = self._slots[self._in_use]
        self._in_use += 1
        slots.clear()
        return slots

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        lengths = slots.begin_step()
        rows = power_of_two(len(tokens))
        width = (slots.longest // GRAPH_BLOCK + 1) * GRAPH_BLOCK
        key = (id(slots), slots.times_moved, rows, width)
        if key not in self._steps:
            self._steps = {each: step for each, step in self._steps.items() if each[0] != key[0] or each[:2] == key[:2]}
            self._steps[key] = _StaticStep(self, slots.layers, rows, width)
        logits = self._steps[key](tokens, lengths)
        slots.end_step()
        return logits


class _StaticStep:
    """One shape: fixed inputs, and on CUDA the graph that reads them."""

    def __init__(self, steps: StaticSteps, cached: Sequence[Tensor], rows: int, width: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.long, device=steps.device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=steps.device)
        every, time = torch.arange(rows, device=steps.device), torch.arange(width, device=steps.device)

        def attend(layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cached[layer][:, :rows].unbind(0)
            keys[every, :, self.lengths] = key
            values[every, :, self.lengths] = value
            hidden_from = ~attentions.in_sight(self.lengths[:, None], time, kind.window)
            return attend_to_cache(query, keys[:, :, :width], values[:, :, :width], hidden_from, kind)

        self.compute: Callable[[], Tensor] = lambda: steps.logits(self.tokens, self.lengths, attend)
        self.prepare = steps.prepare
        self.replay: Callable[[], Tensor] | None = None

    def __call__(self, tokens: Int64[Tensor, " row"], lengths: Int64[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
        count = len(tokens)
        self.tokens[:count], self.lengths[:count] = tokens, lengths
        # Padding rows write their token to position 0 of unused rows of the cache.
        self.tokens[count:], self.lengths[count:] = 0, 0
        if self.replay is None:
            # Only now: the runs before a capture write to the cache, and must write what this step writes.
            self.replay = self.prepare(self.compute)
        return self.replay()[:count]


def captured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A CUDA graph of a computation over fixed addresses; its result lives at one address too."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # so that libraries have made their workspaces
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
