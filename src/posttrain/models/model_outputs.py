"""A model's own forward pass without its output layer, and gradient checkpointing for it.

transformers recomputes activations only in training mode, which would turn dropout on.  Here layers do so in eval mode.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import UserError


def model_hidden(
    model: PreTrainedModel,
    compute_dtype: torch.dtype,
    tokens: Int64[Tensor, "row time"],
    positions: Int64[Tensor, "row time"],
    **more: object,
) -> Float[Tensor, "row time hidden"]:
    """Hidden states by the model's own forward, under autocast if the compute type is bfloat16.

    `positions` are used if the family takes them.
    """
    if "position_ids" in _parameters(model):
        more["position_ids"] = positions
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        out = trunk(model)(input_ids=tokens, **more)
    return cast(Tensor, out.last_hidden_state)


def trunk(model: PreTrainedModel) -> nn.Module:
    if model.base_model is not model:
        return model.base_model
    # A text-only class may name the part that only the whole family has.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise UserError(f"model: a {type(model).__name__} has no part that gives the hidden states before its logits.")
    return parts[0]


def cache_refusal(model: PreTrainedModel) -> str | None:
    """Why completions of this model cannot be sampled from cached keys and values; None if they can."""
    if "past_key_values" not in _parameters(model):
        return f"a {model.config.model_type} does not support a cache of keys and values"
    kept = {type(layer) for layer in DynamicCache(config=model.config).layers}
    others = sorted(kind.__name__ for kind in kept - {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer})
    if others or model._is_stateful:
        return f"layers of a {model.config.model_type} keep more than keys and values ({', '.join(others)})"
    return None


def _parameters(model: PreTrainedModel) -> Mapping[str, object]:
    return signature(trunk(model).forward).parameters


def enable_recomputation(model: PreTrainedModel) -> None:
    """Turn on gradient checkpointing: training keeps only the input of each layer, and computes the rest again."""
    if not recomputable_layers(model):
        raise UserError(
            f"model.gradient_checkpointing: the layers of a {type(model).__name__} cannot be computed again.  Remove"
            " it; a smaller update.tokens_per_microbatch also saves memory."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about a later name
        model.gradient_checkpointing_enable({"use_reentrant": False})
    release_inputs(model)


def release_inputs(model: PreTrainedModel) -> None:
    """Remove the embeddings' hook that transformers adds with gradient checkpointing.

    Only the reentrant kind needs it, and a hook excludes a model from the quicker pass.
    """
    if is_recomputing(model) and model.main_input_name == "input_ids":
        model.disable_input_require_grads()


def recomputable_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_recomputing(model: PreTrainedModel) -> bool:
    return any(layer.gradient_checkpointing for layer in recomputable_layers(model))


@contextmanager
def recomputing_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers with gradient checkpointing are computed again in the backward pass, if gradients are enabled."""
    wanted = torch.is_grad_enabled()
    layers = [layer for layer in recomputable_layers(model) if wanted and layer.gradient_checkpointing]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _recomputed(layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward  # its class's is found again
            else:
                layer.forward = own


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward whose activations are not kept; random numbers are not restored, as dropout is off."""

    @wraps(forward)
    def run(*given: Any, **named: Any) -> Any:
        return checkpoint(partial(forward, **named), *given, use_reentrant=False, preserve_rng_state=False)

    return run
