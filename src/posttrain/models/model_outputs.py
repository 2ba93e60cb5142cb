"""What a model's own forward pass returns without its output layer."""

from collections.abc import Mapping
from inspect import signature
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from posttrain.errors import UserError


def model_hidden(
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    tokens: Int64[Tensor, "row time"],
    positions: Int64[Tensor, "row time"],
    **more: object,
) -> Float[Tensor, "row time hidden"]:
    """Hidden states by the model's own forward, under autocast where the compute type is bfloat16.

    Positions are given where the family has them; others take them from the order of tokens, or have none.
    """
    if "position_ids" in _parameters(model):
        more["position_ids"] = positions
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        out = trunk(model)(input_ids=tokens, **more)
    return cast(Tensor, out.last_hidden_state)


def trunk(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer."""
    if model.base_model is not model:
        return model.base_model
    # A text-only class may name the part that only the whole family has.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise UserError(f"model: a {type(model).__name__} has no part that gives the hidden states before its logits.")
    return parts[0]


def cache_refusal(model: PreTrainedModel) -> str | None:
    """Why completions of this model cannot go on from cached keys and values, in words; None where they can."""
    if "past_key_values" not in _parameters(model):
        return f"a {model.config.model_type} takes no cache of keys and values"
    kept = {type(layer) for layer in DynamicCache(config=model.config).layers}
    others = sorted(kind.__name__ for kind in kept - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer})
    if others or model._is_stateful:
        return f"layers of a {model.config.model_type} keep more than keys and values ({', '.join(others)})"
    return None


def _parameters(model: PreTrainedModel) -> Mapping[str, object]:
    """What the forward function of the model without its output layer takes."""
    return signature(trunk(model).forward).parameters
