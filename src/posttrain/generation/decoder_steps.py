"""Sampling through the decoder of the shared-prompt forward pass."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.generation.slots import KeyValueSlots
from posttrain.generation.stepping import PrefilledPrompts
from posttrain.models.forward import SharedPromptForward
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.attention import AttentionKind, PackedAttention, PackedLayout, capped_scores
from posttrain.models.shared_prompt.decoder import DecoderLayer
from posttrain.models.shared_prompt.linear import Matrix, for_inference, linear


class DecoderSteps:
    """Sampling through the shared-prompt decoder, with every layer's weights prepared once for a sampling."""

    def __init__(self, policy: Policy) -> None:
        assert isinstance(policy.forward, SharedPromptForward)
        self.policy, self.decoder, self.device = policy, policy.forward.decoder, policy.device
        self.layers: list[DecoderLayer] = []
        self.output_layer = policy.output_layer
        self.head: Matrix = self.output_layer.matrix
        self.positions = self.decoder.position_table(policy.max_positions)

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
        layout = PackedLayout([len(prompt) for prompt in prompts])
        capture = _Capture(layout, self.device)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        positions = capture.attention.indices.positions
        ends = torch.tensor(layout.root_starts, device=self.device) + torch.tensor(
            layout.root_lengths, device=self.device
        )
        return PrefilledPrompts(
            logits=self._logits(
                self.decoder.run(tokens, self.positions.at(positions), capture, self.layers, wanted=ends - 1)
            ),
            cached=[capture.padded()],
            lengths=torch.tensor(layout.root_lengths, device=self.device),
        )

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        positions = slots.begin_step()
        attention = _CachedAttention(slots)
        hidden = self.decoder.run(tokens, self.positions.at(positions), attention, self.layers)
        slots.end_step()
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Float[Tensor, "row vocab"]:
        return self.output_layer.of_products(linear(hidden.to(self.policy.compute_dtype), self.head))


class _Capture:
    """Attention over whole prompts that keeps each layer's keys and values."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self.attention = PackedAttention(layout, device)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.kept.append((key, value))
        return self.attention(layer, kind, query, key, value)

    def padded(self) -> Float[Tensor, "prompt two layer kv_heads time width"]:
        """Keys and values of all layers, one padded row per prompt."""
        layout = self.attention.layout
        lengths = torch.tensor(layout.root_lengths)
        time = torch.arange(int(lengths.max()))
        index = torch.tensor(layout.root_starts)[:, None] + torch.minimum(time, lengths[:, None] - 1)  # [prompt time]
        index = index.to(self.kept[0][0].device)
        stacked = torch.stack([torch.stack([kv[which] for kv in self.kept]) for which in (0, 1)])
        return stacked[:, :, index].transpose(3, 4).movedim(2, 0)


class _CachedAttention:
    """Attention of one new token a row over its cached ones, of the layer's kind.

    Written as two batched products: with a single query they are quicker on a CPU than the fused kernel.
    """

    def __init__(self, slots: KeyValueSlots) -> None:
        self.slots = slots
        self._hidden_from: dict[int | None, Tensor | None] = {}

    def __call__(self, layer: int, kind: AttentionKind, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.slots.write(layer, key, value)
        return attend_to_cache(query, keys, values, self._mask(kind.window), kind)

    def _mask(self, window: int | None) -> Tensor | None:
        if window not in self._hidden_from:
            hidden_from = ~self.slots.visible(window)
            self._hidden_from[window] = hidden_from if bool(hidden_from.any()) else None
        return self._hidden_from[window]


def attend_to_cache(
    query: Float[Tensor, "row heads width"],
    keys: Float[Tensor, "row kv_heads time width"],
    values: Float[Tensor, "row kv_heads time width"],
    hidden_from: Bool[Tensor, "row time"] | None,
    kind: AttentionKind,
) -> Float[Tensor, "row heads width"]:
    """softmax(masked scores)·v of one query a row."""
    rows, heads, width = query.shape
    scores = capped_scores(query.view(rows, keys.shape[1], -1, width), keys, kind)  # [row kv_heads heads/kv_heads time]
    if hidden_from is not None:
        scores = scores.masked_fill_(hidden_from[:, None, None, :], -torch.inf)
    return (torch.softmax(scores, dim=-1) @ values).view(rows, heads, width)
