"""The two forward passes of sampling: prompts once each, then one token a row at a time.

`DecoderSteps` runs the decoder of the shared-prompt forward pass; `ModelSteps` is plain, the model's own forward.
Both fill the same cache, in inference mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import Cache, DynamicCache

from posttrain.generation.slots import KeyValueSlots
from posttrain.models.decoder import DecoderLayer, inference_layer
from posttrain.models.forward import SharedPromptForward
from posttrain.models.linear import Weight, for_inference, linear
from posttrain.models.packed import PackedAttention, PackedLayout
from posttrain.models.policy import Policy

MIN_LOGIT = -3.0e38
"""Stands for -inf in additive masks: finite, so that a fully masked row stays a number."""


@dataclass(frozen=True, slots=True)
class PrefilledPrompts:
    """Prompts that went through the model once: what their completions start from."""

    logits: Float[Tensor, "prompt vocab"]
    cached: Float[Tensor, "two layer prompt kv_heads time width"]
    """Keys and values, padded on the right."""
    lengths: Int64[Tensor, " prompt"]


@runtime_checkable
class Steps(Protocol):
    """A model's forward pass, seen from the sampler."""

    def refresh(self) -> None:
        """Read the policy's weights anew; called before every rollout."""
        ...

    def release(self) -> None:
        """Let go of what only a rollout needs; called after it."""
        ...

    def slots(self) -> KeyValueSlots:
        """An empty cache for one rollout."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts."""
        ...

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row; logits of the next."""
        ...


class DecoderSteps:
    """Sampling through `models.decoder`, with every layer's weights made ready once for the whole rollout."""

    def __init__(self, policy: Policy) -> None:
        assert isinstance(policy.forward, SharedPromptForward)
        self.policy, self.decoder, self.device = policy, policy.forward.decoder, policy.device
        self.layers: list[DecoderLayer] = []
        self.head: Weight = policy.head
        self.cos, self.sin = self.decoder.angles(torch.arange(policy.max_positions, device=policy.device))

    def refresh(self) -> None:
        """Read the policy's weights anew."""
        self.layers = [inference_layer(layer) for layer in self.decoder.layers()]
        self.head = for_inference(self.policy.head)

    def release(self) -> None:
        """Let go of the copies."""
        self.layers, self.head = [], self.policy.head

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
        logits = linear(hidden.to(self.policy.compute_dtype), self.head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


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


class ModelSteps:
    """Sampling through any Hugging Face causal model's own forward, with explicit position ids."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def refresh(self) -> None:
        """Nothing to do: the model's own forward reads its own weights."""

    def release(self) -> None:
        """Nothing to do: it made no copies."""

    def slots(self) -> KeyValueSlots:
        """An empty cache for one rollout."""
        return KeyValueSlots()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts, padded on the right: causal attention then needs no mask."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.policy.device)
        time = int(lengths.max())
        tokens = torch.tensor(
            [(*prompt, *(prompt[0],) * (time - len(prompt))) for prompt in prompts], device=self.policy.device
        )
        cache = DynamicCache()
        positions = torch.arange(time, device=self.policy.device).expand(len(prompts), -1)
        hidden = self._hidden(tokens, positions, None, cache)
        last = hidden[torch.arange(len(prompts), device=hidden.device), lengths - 1]
        cached = torch.stack(
            [torch.stack([getattr(layer, kept) for layer in cache.layers]) for kept in ("keys", "values")]
        )
        return PrefilledPrompts(logits=self._logits(last), cached=cached, lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: KeyValueSlots) -> Float[Tensor, "row vocab"]:
        """Run one more token of each row."""
        positions = slots.begin_step()
        hidden = self._hidden(tokens[:, None], positions[:, None], slots.visible(), _SlotCache(slots))
        slots.end_step()
        return self._logits(hidden[:, 0])

    def _hidden(
        self, tokens: Tensor, positions: Tensor, visible: Bool[Tensor, "row time"] | None, cache: Cache
    ) -> Tensor:
        model, dtype = self.policy.model, self.policy.compute_dtype
        mask = None
        if visible is not None:
            mask = torch.zeros(visible.shape, dtype=model.dtype, device=visible.device)
            mask = mask.masked_fill_(~visible, MIN_LOGIT)[:, None, None, :]
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = model.base_model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Float[Tensor, "row vocab"]:
        head = self.policy.head
        logits = F.linear(hidden.to(head.dtype), head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _SlotCache(Cache):
    """Our slots behind the interface that Hugging Face attention layers write their keys and values to."""

    def __init__(self, slots: KeyValueSlots) -> None:
        super().__init__(layers=[])
        self.slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store one token a row, [row kv_heads 1 width]; returns all that the layer sees."""
        return self.slots.write(layer_idx, key_states[:, :, 0], value_states[:, :, 0])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens cached so far, in the longest row."""
        return int(self.slots.lengths.max())
