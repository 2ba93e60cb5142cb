"""An adapter in force, switched off, or merged into the weights; its dropout acts in updates only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters import lora, peft_layers
from posttrain.models.adapters.adaptable import is_4_bit, whole_weight
from posttrain.models.adapters.lora import InputDropout, PeftDropout


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of all adapters in force, by the model's names."""
    found: dict[str, nn.Parameter] = {
        f"{name}.{which}": matrix
        for name, layer in lora.lora_layers(model).items()
        for which, matrix in ((lora.DOWN, layer.lora_A), (lora.UP, layer.lora_B))
    }
    for name, each in peft_layers.peft_layers(model).items():
        for matrix, linear in peft_matrices(each).items():
            found[f"{name}.{matrix}.weight"] = cast(nn.Parameter, linear.weight)
    return found


def peft_matrices(layer: Any) -> dict[str, nn.Linear]:
    """The modules with the matrices in force of a peft layer, such as `lora_A.default`."""
    active = () if layer.disable_adapters else layer.active_adapters
    kinds = ((lora.DOWN, layer.lora_A), (lora.UP, layer.lora_B))
    return {f"{which}.{name}": held[name] for name in active for which, held in kinds if name in held}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: matrix.detach() for name, matrix in adapter_parameters(model).items()}


def trains_adapter_alone(model: nn.Module) -> bool:
    """Whether the model has adapters, and only their matrices are trained."""
    own = {id(matrix) for matrix in adapter_parameters(model).values()}
    return bool(own) and all(id(each) in own for each in model.parameters() if each.requires_grad)


def trains_adapter(model: nn.Module) -> bool:
    """Whether matrices of an adapter are trained, possibly with other weights."""
    return any(matrix.requires_grad for matrix in adapter_parameters(model).values())


def set_until(undone: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute, which gets its old value again when the stack is left."""
    undone.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes exactly what its base does."""
    with ExitStack() as undone:
        for each in peft_layers.peft_layers(model).values():
            theirs = cast(Any, each)
            if not theirs.disable_adapters:
                for matrix in theirs.parameters():
                    undone.callback(matrix.requires_grad_, matrix.requires_grad)
                undone.callback(theirs.enable_adapters, True)  # which makes all of them require a gradient
                theirs.enable_adapters(False)
        for layer in lora.lora_layers(model).values():
            set_until(undone, layer, "off", True)
        yield


@contextmanager
def adapter_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model runs with other matrices of its adapter, such as earlier `adapter_tensors`; no gradients."""
    with ExitStack() as undone:
        for name, layer in lora.lora_layers(model).items():
            factors = lora.Factors(tensors[f"{name}.{lora.DOWN}"], tensors[f"{name}.{lora.UP}"])
            set_until(undone, layer, "stand_in", factors)
        for name, theirs in peft_layers.peft_layers(model).items():
            for matrix, linear in peft_matrices(theirs).items():
                weight = nn.Parameter(tensors[f"{name}.{matrix}.weight"], requires_grad=False)
                set_until(undone, linear, "weight", weight)
        yield


NEEDS_TRAINING_MODE = ("DoraLinearVariant", "QALoraLinearVariant")
"""Variants of peft's layers that drop inputs only in training mode."""


def input_dropouts(model: nn.Module) -> list[InputDropout]:
    found = [module.input_dropout for module in model.modules() if isinstance(module, lora.LoraLinear | PeftDropout)]
    return [each for each in found if each.share > 0]


def drops(model: nn.Module) -> bool:
    """Whether adapters have dropout, so that updates compute something other than sampling does."""
    return bool(input_dropouts(model))


def in_update(dropouts: Sequence[InputDropout]) -> bool:
    """Whether these drop inputs now: inside `adapter_dropout`, with gradients enabled."""
    return torch.is_grad_enabled() and any(each.key is not None for each in dropouts)


def name_tokens(dropouts: Sequence[InputDropout], keys: Int64[Tensor, " *rows"], device: torch.device) -> None:
    """Set the token in each row that these layers will read in the next forward pass."""
    keys = keys.to(device)
    for each in dropouts:
        each.tokens = keys


def without_dropout(model: nn.Module) -> AbstractContextManager[None]:
    return dropout_keys(model, lambda dropout: None)


@contextmanager
def adapter_dropout(model: nn.Module, seed: int, update: int) -> Iterator[None]:
    """Inside, gradients are taken with the adapter's dropout; see `adapters.lora`."""
    with (
        dropout_keys(model, lambda dropout: lora.stream_seed(seed, "dropout", dropout.layer, update)),
        ExitStack() as undone,
    ):
        for layer in peft_layers.peft_layers(model).values():
            variants = [type(each).__name__ for each in cast(Any, layer).lora_variant.values()]
            if any(name in NEEDS_TRAINING_MODE for name in variants) and drops(layer):
                set_until(undone, layer, "training", True)  # not of the modules inside
        yield


@contextmanager
def dropout_keys(model: nn.Module, key: Callable[[InputDropout], int | None]) -> Iterator[None]:
    with ExitStack() as undone:
        for dropout in input_dropouts(model):
            set_until(undone, dropout, "tokens", dropout.tokens)
            set_until(undone, dropout, "key", key(dropout))
        yield


def merged_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The model's weights without adapters and 4-bit layers, by the names of a model without them.

        W' = W + s·B·A, added in float32      W of a 4-bit layer is dequantised

    Each is in `dtype`, or else in that of its W (for a 4-bit layer, the type that it was quantised from).
    Raises UserError for an adapter that is more than that.
    """
    if not peft_layers.adapted_names(model) and not any(is_4_bit(module) for module in model.modules()):
        return cast(dict[str, Tensor], model.state_dict())
    require_mergeable(model)
    changed = dict[str, Tensor]()
    experts = {name: module for name, module in model.named_modules() if isinstance(module, lora.LoraExperts)}
    for name, each in experts.items():
        array = each.array().detach()
        whole = array if each.factors() is None else array.to(each.lora_A.dtype) + each.change().detach()
        changed[f"{lora.without_wrappers(name)}.{each.parameter}"] = whole.to(dtype or array.dtype)
    adapted = {
        name: layer
        for name, module in model.named_modules()
        if name not in experts and (layer := peft_layers.adapted_layer(module)) is not None
    }
    below = {id(layer.base) for layer in adapted.values()}
    for name, layer in adapted.items():
        weight = whole_weight(layer.base)
        if layer.factors is not None:
            change = layer.scale * (layer.factors.up.detach() @ layer.factors.down.detach())
            weight = (weight.to(change.dtype) + change).to(dtype or weight.dtype)
        changed[f"{name}.weight"] = stored(layer.base, weight)
    for name, module in model.named_modules():
        if is_4_bit(module) and id(module) not in below:
            changed[f"{name}.weight"] = stored(module, whole_weight(module))
    made: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        plain = lora.without_wrappers(name)
        of_experts = name.rpartition(".")[0] in experts and name.rpartition(".")[2] in (lora.DOWN, lora.UP)
        of_adapter = of_experts or any(name.startswith(f"{layer}.") and ".base_layer." not in name for layer in adapted)
        of_4_bits = any(plain.startswith(f"{changed_name}.") for changed_name in changed)
        if not of_adapter and not of_4_bits:
            made[plain] = changed.get(plain, tensor)
    return made


def stored(layer: nn.Module, weight: Tensor) -> Tensor:
    return (weight.T if isinstance(layer, Conv1D) else weight).contiguous()


def require_mergeable(model: PreTrainedModel) -> None:
    """Refuse peft adapters that are more than matrices to be added."""
    faults = []
    for name, layer in peft_layers.peft_layers(model).items():
        plain_kind = peft_layers.is_adapter_layer(layer)
        fault = peft_layers.more_than_plain(layer) if plain_kind else f"is a {peft_layers.full_name(type(layer))}"
        faults += [] if fault is None else [f"{name} {fault}"]
    whole = [name for name in model.state_dict() if ".modules_to_save." in name]
    faults += [f"{name} is of a module that is saved whole" for name in whole]
    if faults:
        remedy = "Save only the adapter, and merge it with peft's merge_and_unload()."
        raise UserError(f"model.adapter.save: {faults[0]}, which cannot be merged here.  {remedy}")
