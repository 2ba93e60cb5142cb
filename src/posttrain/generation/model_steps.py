"""Sampling through any Hugging Face causal model's own forward pass, with explicit position ids."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import Cache, DynamicCache

from posttrain.generation.slots import KeyValueSlots
from posttrain.generation.stepping import PrefilledPrompts
from posttrain.models.policy import Policy

MIN_LOGIT = -3.0e38
"""Stands for -inf in additive masks: finite, so that a fully masked row stays a number."""


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
        return self.policy.output_layer.logits(hidden)


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
