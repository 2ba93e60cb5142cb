"""Sampling through any Hugging Face causal model's own forward pass, its keys and values cached."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer

from posttrain.generation.aligned_slots import AlignedSlots
from posttrain.generation.stepping import PrefilledPrompts
from posttrain.models.model_outputs import model_hidden
from posttrain.models.policy import Policy


class ModelSteps:
    """Sampling through the model's own forward, with the masks that it makes itself and explicit positions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def refresh(self) -> None:
        """Nothing to do: the model's own forward reads its own weights."""

    def release(self) -> None:
        """Nothing to do: it made no copies."""

    def slots(self) -> AlignedSlots:
        return AlignedSlots()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts, padded on the right: causal attention then needs no mask."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.policy.device)
        time = int(lengths.max())
        tokens = torch.tensor(
            [(*prompt, *(prompt[0],) * (time - len(prompt))) for prompt in prompts], device=self.policy.device
        )
        cache = DynamicCache()
        positions = torch.arange(time, device=self.policy.device).expand(len(prompts), -1)
        hidden = self._hidden(tokens, positions, cache, None)
        last = hidden[torch.arange(len(prompts), device=hidden.device), lengths - 1]
        cached = [each for layer in cache.layers for each in self._kept(layer, hidden)]
        return PrefilledPrompts(logits=self.policy.output_layer.logits(last), cached=cached, lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: AlignedSlots) -> Float[Tensor, "row vocab"]:
        positions = slots.begin_step()
        hidden = self._hidden(tokens[:, None], positions[:, None], _slot_cache(slots), slots.visible())
        slots.end_step()
        return self.policy.output_layer.logits(hidden[:, 0])

    def _hidden(self, tokens: Tensor, positions: Tensor, cache: Cache, visible: Tensor | None) -> Tensor:
        seen = {} if visible is None else {"attention_mask": visible.long()}
        policy = self.policy
        return model_hidden(
            policy.model, policy.compute_dtype, tokens, positions, past_key_values=cache, use_cache=True, **seen
        )

    def _kept(self, layer: object, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole prompts as they are cached; under autocast both in its type, as products take them.

        A layer that reads another's has none.
        """
        assert isinstance(layer, DynamicLayer | DummyLayer)
        if layer.keys is None or layer.values is None:
            nothing = hidden.new_zeros(len(hidden), 0, hidden.shape[1], 1)
            return nothing, nothing
        if self.policy.compute_dtype == torch.bfloat16:
            return layer.keys.bfloat16(), layer.values.bfloat16()
        return layer.keys, layer.values


def _slot_cache(slots: AlignedSlots) -> DynamicCache:
    """The slots behind the interface that Hugging Face models cache through."""
    cache = DynamicCache()
    cache.layers = [_SlotLayer(slots, index) for index in range(slots.num_layers)]
    return cache


class _SlotLayer(DynamicLayer):
    """One layer of the slots during one step."""

    def __init__(self, slots: AlignedSlots, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots, self.index, self.is_initialized = slots, index, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store one token a row, [row kv_heads 1 width]; returns all that the layer sees."""
        return self.slots.write(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.slots.seen
