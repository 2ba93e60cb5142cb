"""Adapters added into the weights of the model below them, for a model that stands alone."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.experts import LoraExperts, without_wrappers
from posttrain.models.adapters.lora import DOWN, UP
from posttrain.models.adapters.peft_layers import (
    AdaptedLayer,
    adapted_layer,
    full_class_name,
    is_adapter_layer,
    more_than_plain,
    peft_layers,
)
from posttrain.models.adapters.quantized import is_4_bit, whole_weight


def merged_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The model's weights as if it had neither adapters nor 4-bit layers, by the names of a model without.

        W' = W + s·B·A, added in float32      of a 4-bit layer W is what its numbers stand for

    Made from a copy, a matrix at a time, each in `dtype`, or in that of its W (a 4-bit one's: what it was made from).
    Raises UserError where an adapter is more than that.
    """
    require_mergeable(model)
    changed = dict[str, Tensor]()
    experts = {name: module for name, module in model.named_modules() if isinstance(module, LoraExperts)}
    for name, each in experts.items():
        array = each.array().detach()
        whole = array if each.factors() is None else array.to(each.lora_A.dtype) + each.change().detach()
        changed[f"{without_wrappers(name)}.{each.parameter}"] = whole.to(dtype or array.dtype)
    adapted = {
        name: layer
        for name, module in model.named_modules()
        if name not in experts and (layer := adapted_layer(module)) is not None
    }
    below = {id(layer.base) for layer in adapted.values()}
    for name, layer in adapted.items():
        changed[f"{name}.weight"] = stored(layer.base, merged(layer, dtype))
    for name, module in model.named_modules():
        if is_4_bit(module) and id(module) not in below:
            changed[f"{name}.weight"] = stored(module, whole_weight(module))
    made: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        plain = without_wrappers(name)
        of_experts = name.rpartition(".")[0] in experts and name.rpartition(".")[2] in (DOWN, UP)
        of_adapter = of_experts or any(name.startswith(f"{layer}.") and ".base_layer." not in name for layer in adapted)
        of_4_bits = any(plain.startswith(f"{changed_name}.") for changed_name in changed)
        if not of_adapter and not of_4_bits:
            made[plain] = changed.get(plain, tensor)
    return made


def merged(layer: AdaptedLayer, dtype: torch.dtype | None) -> Tensor:
    """W' of a layer."""
    weight = whole_weight(layer.base)
    if layer.factors is None:
        return weight
    change = layer.scale * (layer.factors.up.detach() @ layer.factors.down.detach())
    return (weight.to(change.dtype) + change).to(dtype or weight.dtype)


def stored(layer: nn.Module, weight: Tensor) -> Tensor:
    """A matrix as its layer keeps it."""
    return (weight.T if isinstance(layer, Conv1D) else weight).contiguous()


def require_mergeable(model: PreTrainedModel) -> None:
    """Refuse adapters of peft that are more than matrices to be added."""
    for name, layer in peft_layers(model).items():
        told = more_than_plain(layer) if is_adapter_layer(layer) else f"is a {full_class_name(layer)}"
        if told is not None:
            raise not_merged(f"{name} {told}")
    whole = next((name for name in model.state_dict() if ".modules_to_save." in name), None)
    if whole is not None:
        raise not_merged(f"{whole} is of a module that is saved whole")


def not_merged(what: str) -> UserError:
    """What to raise of an adapter that is more."""
    return UserError(
        f"model.adapter.save: {what}, which is not merged here.  Save the adapter alone, and merge it with peft:"
        " merge_and_unload()."
    )
