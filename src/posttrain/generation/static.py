"""Decoding steps of fixed shapes, which a GPU replays as one graph instead of launching every operation anew.

A step is padded to a power of two of rows and to a multiple of `BLOCK` cached tokens, its inputs are copied to fixed
addresses, and each shape is captured once.  Weights, cache and inputs keep their addresses from rollout to
rollout.  On a CPU the same padded step runs without capture, which is how the tests reach it.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.generation.decoder_steps import DecoderSteps, attend_to_cache
from posttrain.generation.slots import KeyValueSlots, power_of_two
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.attention import AttentionKind, in_sight

BLOCK = 256
"""Cached tokens that a captured step attends to are a multiple of this."""
WARM_UPS = 2
"""Runs before a capture, so that libraries have made their workspaces."""


class StaticSteps(DecoderSteps):
    """Sampling through `models.shared_prompt.decoder` in steps of fixed shapes."""

    head: Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.prepare = captured if policy.device.type == "cuda" else uncaptured
        self.layers = [self.decoder.layer(index).owned() for index in range(self.decoder.num_layers)]
        self.output_layer = policy.output_layer.copy()
        self.head = self.output_layer.matrix
        self._slots = KeyValueSlots(block=BLOCK, round_rows=True)
        self._steps: dict[tuple[int, int, int], _StaticStep] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's weights, in place."""
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
        width = (int(lengths.max()) // BLOCK + 1) * BLOCK
        key = (rows, width, slots.times_moved)
        if key not in self._steps:
            self._steps = {other: step for other, step in self._steps.items() if other[2] == slots.times_moved}
            self._steps[key] = _StaticStep(self, slots.layers, rows, width)
        logits = self._steps[key](tokens, lengths)
        slots.end_step()
        return logits

    def compute(
        self, tokens: Int64[Tensor, " row"], lengths: Int64[Tensor, " row"], attention: "_StaticAttention"
    ) -> Float[Tensor, "row vocab"]:
        hidden = self.decoder.run(tokens, self.positions.at(lengths), attention, self.layers)
        return self._logits(hidden)


class _StaticStep:
    """One shape: fixed inputs, and on CUDA the graph that reads them."""

    def __init__(self, steps: StaticSteps, cached: Sequence[Tensor], rows: int, width: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.long, device=steps.device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=steps.device)
        attention = _StaticAttention(cached, self.lengths, width)
        self.compute: Callable[[], Tensor] = lambda: steps.compute(self.tokens, self.lengths, attention)
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


def uncaptured(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return compute


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


class _StaticAttention:
    """Attention of one new token a row over a fixed width of the cache, later tokens masked."""

    def __init__(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"], width: int) -> None:
        self.cached, self.lengths, self.width = cached, lengths, width
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.time = torch.arange(width, device=lengths.device)

    def __call__(self, layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cached[layer][:, : len(self.rows)].unbind(0)
        keys[self.rows, :, self.lengths] = key
        values[self.rows, :, self.lengths] = value
        keys, values = keys[:, :, : self.width], values[:, :, : self.width]
        hidden_from = ~in_sight(self.lengths[:, None], self.time, kind.window)
        return attend_to_cache(query, keys, values, hidden_from, kind)
