"""An adapter in force, switched off, or merged into the weights; its dropout acts in updates only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.dropout import InputDropout, PeftDropout
from posttrain.models.adapters.lora import (
    DOWN,
    UP,
    Factors,
    LoraExperts,
    LoraLinear,
    lora_layers,
    stream_seed,
    without_wrappers,
)
from posttrain.models.adapters.peft_layers import (
    AdaptedLayer,
    adapted_layer,
    full_class_name,
    is_adapter_layer,
    more_than_plain,
    peft_layers,
)
from posttrain.models.adapters.quantized import is_4_bit, whole_weight


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of all adapters in force, by the model's names."""
    found: dict[str, nn.Parameter] = {
        f"{name}.{which}": matrix
        for name, layer in lora_layers(model).items()
        for which, matrix in ((DOWN, layer.lora_A), (UP, layer.lora_B))
    }
    for name, each in peft_layers(model).items():
        for matrix, linear in peft_matrices(each).items():
            found[f"{name}.{matrix}.weight"] = cast(nn.Parameter, linear.weight)
    return found


def peft_matrices(layer: Any) -> dict[str, nn.Linear]:
    """The modules with the matrices in force of a peft layer, such as `lora_A.default`."""
    active = () if layer.disable_adapters else layer.active_adapters
    kinds = ((DOWN, layer.lora_A), (UP, layer.lora_B))
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


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes exactly what its base does."""
    with ExitStack() as undone:
        for theirs in peft_layers(model).values():
            undone.enter_context(disabled(theirs))
        for layer in lora_layers(model).values():
            undone.callback(setattr, layer, "off", layer.off)
            layer.off = True
        yield


@contextmanager
def disabled(layer: Any) -> Iterator[None]:
    """Inside, a peft layer is its base; afterwards the same matrices as before require a gradient."""
    if layer.disable_adapters:
        yield
        return
    took = [(matrix, matrix.requires_grad) for matrix in layer.parameters()]
    layer.enable_adapters(False)
    try:
        yield
    finally:
        layer.enable_adapters(True)  # which makes all of them require a gradient
        for matrix, gradient in took:
            matrix.requires_grad_(gradient)


@contextmanager
def adapter_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model runs with other matrices of its adapter, such as earlier `adapter_tensors`; no gradients."""
    with ExitStack() as undone:
        for name, layer in lora_layers(model).items():
            undone.callback(setattr, layer, "stand_in", layer.stand_in)
            layer.stand_in = Factors(tensors[f"{name}.{DOWN}"], tensors[f"{name}.{UP}"])
        for name, theirs in peft_layers(model).items():
            for matrix, linear in peft_matrices(theirs).items():
                undone.callback(setattr, linear, "weight", linear.weight)
                linear.weight = nn.Parameter(tensors[f"{name}.{matrix}.weight"], requires_grad=False)
        yield


NEEDS_TRAINING_MODE = ("DoraLinearVariant", "QALoraLinearVariant")
"""Variants of peft's layers that drop inputs only in training mode."""


def input_dropouts(model: nn.Module) -> list[InputDropout]:
    found = [module.input_dropout for module in model.modules() if isinstance(module, LoraLinear | PeftDropout)]
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


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, adapters drop nothing."""
    with dropout_keys(model, lambda dropout: None):
        yield


@contextmanager
def adapter_dropout(model: nn.Module, seed: int, update: int) -> Iterator[None]:
    """Inside, gradients are taken with the adapter's dropout, with the masks of `adapters.dropout`."""
    with (
        dropout_keys(model, lambda dropout: stream_seed(seed, "dropout", dropout.layer, update)),
        ExitStack() as undone,
    ):
        for layer in peft_layers(model).values():
            variants = [type(each).__name__ for each in cast(Any, layer).lora_variant.values()]
            if any(name in NEEDS_TRAINING_MODE for name in variants) and drops(layer):
                undone.callback(setattr, layer, "training", layer.training)
                layer.training = True  # not of the modules inside
        yield


@contextmanager
def dropout_keys(model: nn.Module, key: Callable[[InputDropout], int | None]) -> Iterator[None]:
    with ExitStack() as undone:
        for dropout in input_dropouts(model):
            undone.callback(setattr, dropout, "tokens", dropout.tokens)
            undone.callback(setattr, dropout, "key", dropout.key)
            dropout.key = key(dropout)
        yield


def merged_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The model's weights without adapters and 4-bit layers, by the names of a model without them.

        W' = W + s·B·A, added in float32      W of a 4-bit layer is dequantised

    Each is in `dtype`, or else in that of its W (for a 4-bit layer, the type that it was quantised from).
    Raises UserError for an adapter that is more than that.
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
    weight = whole_weight(layer.base)
    if layer.factors is None:
        return weight
    change = layer.scale * (layer.factors.up.detach() @ layer.factors.down.detach())
    return (weight.to(change.dtype) + change).to(dtype or weight.dtype)


def stored(layer: nn.Module, weight: Tensor) -> Tensor:
    return (weight.T if isinstance(layer, Conv1D) else weight).contiguous()


def require_mergeable(model: PreTrainedModel) -> None:
    """Refuse peft adapters that are more than matrices to be added."""
    found = {
        name: more_than_plain(layer) if is_adapter_layer(layer) else f"is a {full_class_name(layer)}"
        for name, layer in peft_layers(model).items()
    }
    found |= {name: "is of a module that is saved whole" for name in model.state_dict() if ".modules_to_save." in name}
    faults = [f"{name} {fault}" for name, fault in found.items() if fault is not None]
    if faults:
        raise UserError(
            f"model.adapter.save: {faults[0]}, which cannot be merged here.  Save only the adapter, and merge it with"
            " peft's merge_and_unload()."
        )
