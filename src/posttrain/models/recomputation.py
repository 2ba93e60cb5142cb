"""Gradient checkpointing for a model in eval mode: layers are computed again in the backward pass.

Layers of transformers do so by themselves only in training mode, which would turn dropout on; here they do while a
context is open, and stay in eval mode.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.errors import UserError
from posttrain.models.loading.construction import ONE_AT_A_TIME


def enable_recomputation(model: PreTrainedModel) -> None:
    """Have the forward passes of training keep no more than the input of each layer.

    A model object on which `gradient_checkpointing_enable()` was called is the same.  Raises UserError where the model
    has no layers that can be computed again.
    """
    if not recomputable_layers(model):
        raise UserError(
            f"model.gradient_checkpointing: the layers of a {type(model).__name__} cannot be computed again.  Leave the"
            " option out; a smaller update.tokens_per_microbatch saves memory too."
        )
    with ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that all versions know is to be another
        model.gradient_checkpointing_enable({"use_reentrant": False})
    release_inputs(model)


def release_inputs(model: PreTrainedModel) -> None:
    """Take off the hook of the embeddings that transformers puts there with gradient checkpointing.

    It makes their output require a gradient, for the reentrant kind alone; a hook keeps a model from the quicker pass.
    """
    if is_recomputing(model) and model.main_input_name == "input_ids":
        model.disable_input_require_grads()


def recomputable_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The layers that may be computed again in the backward pass."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_recomputing(model: PreTrainedModel) -> bool:
    """Whether gradient checkpointing was asked for."""
    return any(layer.gradient_checkpointing for layer in recomputable_layers(model))


@contextmanager
def recomputing_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within this, layers for which it was asked are computed again in the backward pass, where there is to be one."""
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
    """A layer's forward whose activations are thrown away; random numbers are not restored, for dropout is off."""

    @wraps(forward)
    def run(*given: Any, **named: Any) -> Any:
        return checkpoint(partial(forward, **named), *given, use_reentrant=False, preserve_rng_state=False)

    return run
