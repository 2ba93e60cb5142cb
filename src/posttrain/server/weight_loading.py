"""Loads weights from a file into the served model: all checks come first, so that a fault changes nothing.

A file has all weights under the names of the saved model, tied ones once, or an adapter's matrices under PEFT's names.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from posttrain.errors import UserError
from posttrain.generation.rl_protocol import AdapterFields
from posttrain.models.adapters import lora
from posttrain.models.adapters.peft_format import adapter_settings, plain_lora, put_adapter, written_tensors
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.loading import construction
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy, as_policy
from posttrain.server.requests import RefusedRequest

HEADER_BYTES = 16 << 20
"""Maximum bytes of a file that are not tensors."""
WIDEST_BYTES = 8
"""Bytes per number."""
SAME_IN_ALL = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings of an adapter that are not visible in its matrices."""

Tensors = Mapping[str, Tensor]
Change = Callable[[], Policy]
"""Loads checked weights, between two tokens, and returns the policy that then samples."""


def most_bytes(policy: Policy) -> int:
    """Maximum bytes of a file of weights for this model."""
    return WIDEST_BYTES * sum(each.numel() for each in policy.model.parameters()) + HEADER_BYTES


def base_digest(policy: Policy) -> str:
    """`model_digest` of the folder that the model was loaded from; empty without a folder."""
    return model_digest(Path(policy.model.name_or_path)) if policy.model.name_or_path else ""


def change_to(
    policy: Policy,
    content: bytes,
    adapter: AdapterFields | None,
    hands_off: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Change:
    """A function that loads the weights of a file.  Raises RefusedRequest if they are not for this model.

    The model can sample in the meantime, except inside `hands_off`.
    """
    try:
        tensors: Tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RefusedRequest(f"weights: not a complete safetensors file ({error})") from error
    if adapter is not None:
        with hands_off():  # the first adapter is tried on the model
            return adapter_change(policy, tensors, adapter)
    if adapted_names(policy.model):
        raise RefusedRequest(
            "weights: this server has an adapter, and only accepts new weights for it.  Restart the server."
        )
    shapes = {name: each.shape for name, each in ExportedWeights(policy).merged().items()}
    require_shapes(tensors, shapes)
    held = policy.model.state_dict()
    if any(name not in held or held[name].shape != shape for name, shape in shapes.items()):
        with hands_off():  # transformers changes torch's default type for the whole process while it loads
            tensors = as_held(policy, tensors)

    return partial(loaded_into, policy, held, tensors)


def as_held(policy: Policy, tensors: Tensors) -> Tensors:
    """The weights in the model's own form, if it saves them in another form, such as one expert at a time."""
    model = policy.model
    try:
        given = {"config": model.config, "state_dict": dict(tensors), "dtype": model.dtype}
        made, lacking, _ = construction.loaded(type(model), None, **given)
    except construction.LOAD_ERRORS as error:
        raise RefusedRequest(f"weights: {construction.first_words(error)}") from error
    if lacking:
        raise RefusedRequest(f"weights: {lacking[0]} is missing (in transformers' names)")
    found: Tensors = made.state_dict()
    return found


def require_shapes(tensors: Tensors, expected: Mapping[str, torch.Size]) -> None:
    """Reject names and shapes that differ from the model's, and numbers that are not floating-point."""
    lacking, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    faults = [
        *(f"{name} is missing" for name in lacking),
        *(f"{name} does not belong to this model" for name in unknown),
        *(
            f"{name} has the shape {[*each.shape]}, but the model's is {[*expected[name]]}"
            for name, each in tensors.items()
            if name in expected and each.shape != expected[name]
        ),
        *(f"{name} is {each.dtype}" for name, each in tensors.items() if not each.is_floating_point()),
    ]
    if faults:
        more = f" ({len(faults)} faults in total)" if len(faults) > 1 else ""
        raise RefusedRequest(f"weights: {faults[0]}{more}.  Send weights of the served model.")


@torch.no_grad()
def loaded_into(policy: Policy, held: Mapping[str, Tensor], tensors: Tensors) -> Policy:
    """The policy, after its weights have been overwritten."""
    for name, tensor in tensors.items():
        held[name].copy_(tensor)
    return policy


def adapter_change(policy: Policy, tensors: Tensors, adapter: AdapterFields) -> Change:
    """The same for the matrices of an adapter on the served base model."""
    model = policy.model
    if not adapted_names(model):
        return first_adapter(policy, tensors, adapter)
    held, settings = written_tensors(model), adapter_settings(model)
    require_shapes(tensors, {name: each.shape for name, each in held.items()})
    for name in SAME_IN_ALL:
        if adapter.settings.get(name) != settings[name]:
            rule = f"{name} = {adapter.settings.get(name)!r:.80}, but the served adapter has {settings[name]!r:.80}"
            raise RefusedRequest(f"adapter: {rule}.  Restart the server for another adapter.")

    return partial(loaded_into, policy, held, tensors)


def first_adapter(policy: Policy, tensors: Tensors, adapter: AdapterFields) -> Change:
    """A function that adds an adapter to the base; it is tested on the model immediately, and removed again."""
    model = policy.model
    try:
        saved = plain_lora(Path(), adapter.settings, tensors, "adapter")
        put_adapter(model, saved, None)
    except (UserError, *construction.LOAD_ERRORS) as error:
        raise RefusedRequest(f"adapter: {error}") from error
    finally:
        take_off(policy)

    def put() -> Policy:
        put_adapter(model, saved, None)
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if policy.compute_dtype == torch.bfloat16 else "float32"
        made = as_policy(model, policy.tokenizer, dtype=dtype, context=policy.context)
        return replace(made, stop_ids=policy.stop_ids, stored_dtype=policy.stored_dtype)

    return put


def take_off(policy: Policy) -> None:
    """Remove adapters; their base layers are unchanged."""
    while layers := lora.lora_layers(policy.model):
        name, layer = next(iter(layers.items()))
        lora.put_layer(policy.model, name, layer.base_layer)
