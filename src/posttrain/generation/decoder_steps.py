"""Sampling through the decoder of the shared-prompt forward pass."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.generation.slots import KeyValueSlots
from posttrain.generation.stepping import PrefilledPrompts
from posttrain.models.forward import SharedPromptForward
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.decoder import DecoderLayer, inference_layer
from posttrain.models.shared_prompt.linear import Weight, for_inference, linear
from posttrain.models.shared_prompt.packed import PackedAttention, PackedLayout


class DecoderSteps:
    """Sampling through the shared-prompt decoder, with every layer's weights made ready once for the whole rollout."""

    def __init__(self, policy: Policy) -> None:
        assert isinstance(policy.forward, SharedPromptForward)
        self.policy, self.decoder, self.device = policy, policy.forward.decoder, policy.device
        self.layers: list[DecoderLayer] = []
        self.output_layer = policy.output_layer
        self.head: Weight = self.output_layer.matrix
        self.cos, self.sin = self.decoder.angles(torch.arange(policy.max_positions, device=policy.device))

    def refresh(self) -> None:
        """Read the policy's weights anew."""
        self.layers = [inference_layer(layer) for layer in self.decoder.layers()]
        self.output_layer = self.policy.output_layer
        self.head = for_inference(self.output_layer.matrix)

    def release(self) -> None:
        """Let go of the copies."""
        self.layers, self.output_layer = [], self.policy.output_layer
        self.head = self.output_layer.matrix

    def slots(self) -> KeyValueSlots:
        """An empty cache for one rollout."""
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
        angles = self.cos[positions], self.sin[positions]
        return PrefilledPrompts(
            logits=self._logits(self.decoder.run(tokens, angles, capture, self.layers, wanted=ends - 1)),
            cached=capture.padded(),
            lengths=torch.tensor(layout.root_lengths, device=self.device),
        )

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row."""
        positions = slots.begin_step()
        attention = _CachedAttention(slots)
        hidden = self.decoder.run(tokens, (self.cos[positions], self.sin[positions]), attention, self.layers)
        slots.end_step()
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Float[Tensor, "row vocab"]:
        return self.output_layer.of_products(linear(hidden.to(self.policy.compute_dtype), self.head))


class _Capture:
    """Attention over whole prompts that keeps each layer's keys and values."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self.attention = PackedAttention(layout, device)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.kept.append((key, value))
        return self.attention(layer, query, key, value)

    def padded(self) -> Float[Tensor, "two layer prompt kv_heads time width"]:
        """Keys and values of all layers, one padded row per prompt."""
        layout = self.attention.layout
        lengths = torch.tensor(layout.root_lengths)
        time = torch.arange(int(lengths.max()))
        index = torch.tensor(layout.root_starts)[:, None] + torch.minimum(time, lengths[:, None] - 1)  # [prompt time]
        index = index.to(self.kept[0][0].device)
        stacked = torch.stack([torch.stack([kv[which] for kv in self.kept]) for which in (0, 1)])
        return stacked[:, :, index].transpose(3, 4)  # [two layer prompt kv_heads time width]


class _CachedAttention:
    """Attention of one new token a row over its cached ones, softmax(q·kᵀ/√width)·v.

    Written as two batched products: with a single query they are quicker on a CPU than the fused kernel.
    """

    def __init__(self, slots: KeyValueSlots) -> None:
        self.slots = slots
        hidden_from = ~slots.visible()
        self.hidden_from = hidden_from[:, None, None, :] if bool(hidden_from.any()) else None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.slots.write(layer, key, value)
        rows, heads, width = query.shape
        grouped = query.view(rows, keys.shape[1], -1, width) * width**-0.5
        scores = grouped @ keys.transpose(2, 3)  # [row kv_heads heads/kv_heads time]
        if self.hidden_from is not None:
            scores = scores.masked_fill_(self.hidden_from, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ values).view(rows, heads, width)
