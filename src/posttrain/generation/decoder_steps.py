"""Sampling through the decoder of the shared-prompt forward pass.

On a GPU, steps have fixed shapes, which it replays as one graph instead of launching every operation anew.  A step is
padded to a power of two of rows and to a multiple of `GRAPH_BLOCK` cached tokens, its inputs are copied to fixed
addresses, and each shape is captured once.  Weights, cache and inputs keep their addresses from rollout to rollout.  On
a CPU the same padded step runs without capture, which is how the tests reach it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.generation.slots import KeyValueSlots, PrefilledPrompts, Steps, power_of_two
from posttrain.models.forward import SharedPromptForward
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt import attention as attentions
from posttrain.models.shared_prompt.attention import AttentionKind
from posttrain.models.shared_prompt.decoder import Attend, DecoderLayer, Positions
from posttrain.models.shared_prompt.linear import Matrix, for_inference, linear

GRAPH_BLOCK = 256
"""Cached tokens that a captured step attends to are a multiple of this."""
WARM_UPS = 2
"""Runs before a capture, so that libraries have made their workspaces."""


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
        layout = attentions.PackedLayout([len(prompt) for prompt in prompts])
        attention = attentions.PackedAttention(layout, self.device)
        kept: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kept.append((key, value))
            return attention(layer, kind, query, key, value)

        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        starts = torch.tensor(layout.root_starts, device=self.device)
        lengths = torch.tensor(layout.root_lengths, device=self.device)
        logits = self.logits(tokens, attention.indices.positions, attend, wanted=starts + lengths - 1)
        time = torch.arange(max(layout.root_lengths), device=self.device)
        index = starts[:, None] + torch.minimum(time, lengths[:, None] - 1)  # [prompt time]
        stacked = torch.stack([torch.stack([kv[which] for kv in kept]) for which in (0, 1)])
        padded = stacked[:, :, index].transpose(3, 4).movedim(2, 0)  # [prompt two layer kv_heads time width]
        return PrefilledPrompts(logits=logits, cached=[padded], lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        @cache
        def hidden_from(window: int | None) -> Tensor | None:
            hidden = ~slots.visible(window)
            return hidden if bool(hidden.any()) else None

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

    Written as two batched products: with a single query they are quicker on a CPU than the fused kernel.
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
        self._slots = KeyValueSlots(block=GRAPH_BLOCK, round_rows=True)
        self._steps: dict[tuple[int, int, int], _StaticStep] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.take_over(self.decoder.layer(index))
        self.output_layer.take_over(self.policy.output_layer)

    def release(self) -> None:
        """Nothing to do: captured steps read the weights where they are."""

    def slots(self) -> KeyValueSlots:
        """The emptied cache; one sampling uses it at a time."""
        self._slots.clear()
        return self._slots

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        lengths = slots.begin_step()
        rows = power_of_two(len(tokens))
        width = (int(lengths.max()) // GRAPH_BLOCK + 1) * GRAPH_BLOCK
        key = (rows, width, slots.times_moved)
        if key not in self._steps:
            self._steps = {other: step for other, step in self._steps.items() if other[2] == slots.times_moved}
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
        for _ in range(WARM_UPS):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
