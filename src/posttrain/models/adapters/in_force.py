"""What is in force of a model's adapters, ours or peft's: matrices and dropout, and contexts in which they change."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from posttrain.models.adapters.dropout import InputDropout, PeftDropout
from posttrain.models.adapters.lora import DOWN, UP, Factors, LoraLinear, lora_layers, stream_seed
from posttrain.models.adapters.peft_layers import peft_layers


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of all adapters in force, by the names that the model has for them."""
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
    """What holds the matrices in force of a layer of peft, such as `lora_A.default`."""
    active = () if layer.disable_adapters else layer.active_adapters
    kinds = ((DOWN, layer.lora_A), (UP, layer.lora_B))
    return {f"{which}.{name}": held[name] for name in active for which, held in kinds if name in held}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The matrices of all adapters by name, as they are now; they go on changing."""
    return {name: matrix.detach() for name, matrix in adapter_parameters(model).items()}


def trains_adapter_alone(model: nn.Module) -> bool:
    """Whether the model has adapters, and takes a gradient in their matrices and nowhere else."""
    own = {id(matrix) for matrix in adapter_parameters(model).values()}
    return bool(own) and all(id(each) in own for each in model.parameters() if each.requires_grad)


def trains_adapter(model: nn.Module) -> bool:
    """Whether matrices of an adapter take a gradient, whatever else does beside them."""
    return any(matrix.requires_grad for matrix in adapter_parameters(model).values())


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what its base does, to the bit."""
    layers = lora_layers(model).values()
    with ExitStack() as undone:
        for theirs in peft_layers(model).values():
            undone.enter_context(disabled(theirs))
        for layer in layers:
            undone.callback(setattr, layer, "off", layer.off)
            layer.off = True
        yield


@contextmanager
def disabled(layer: Any) -> Iterator[None]:
    """Inside, a layer of peft is as its base; what took a gradient takes one again behind it, and nothing else."""
    if layer.disable_adapters:
        yield
        return
    took = [(matrix, matrix.requires_grad) for matrix in layer.parameters()]
    layer.enable_adapters(False)
    try:
        yield
    finally:
        layer.enable_adapters(True)  # which would have all of them take one
        for matrix, gradient in took:
            matrix.requires_grad_(gradient)


@contextmanager
def adapter_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model runs with other matrices of its adapter, such as `adapter_tensors` once gave; no gradients."""
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
"""What peft's layers have beside B·A that drops inputs only in training mode."""


def input_dropouts(model: nn.Module) -> list[InputDropout]:
    """The dropout of every adapter that has one."""
    found = [module.input_dropout for module in model.modules() if isinstance(module, LoraLinear | PeftDropout)]
    return [each for each in found if each.share > 0]


def drops(model: nn.Module) -> bool:
    """Whether updates compute something else than sampling does, because adapters drop inputs."""
    return bool(input_dropouts(model))


def in_update(dropouts: Sequence[InputDropout]) -> bool:
    """Whether these drop inputs now: inside `adapter_dropout`, and where there is to be a gradient."""
    return torch.is_grad_enabled() and any(each.key is not None for each in dropouts)


def name_tokens(dropouts: Sequence[InputDropout], keys: Int64[Tensor, " *rows"], device: torch.device) -> None:
    """Say which token is in each row of what these layers will read, until the next forward pass says so."""
    keys = keys.to(device)
    for each in dropouts:
        each.tokens = keys


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, adapters drop nothing, also where gradients are taken with their dropout."""
    with keyed(model, lambda dropout: None):
        yield


@contextmanager
def adapter_dropout(model: nn.Module, seed: int, update: int) -> Iterator[None]:
    """Inside, gradients are taken with the adapter's dropout; its masks are those of `adapters.dropout`."""
    with keyed(model, lambda dropout: stream_seed(seed, "dropout", dropout.layer, update)), ExitStack() as undone:
        for layer in peft_layers(model).values():
            variants = [type(each).__name__ for each in cast(Any, layer).lora_variant.values()]
            if any(name in NEEDS_TRAINING_MODE for name in variants) and drops(layer):
                undone.callback(setattr, layer, "training", layer.training)
                layer.training = True  # of the layer alone: what is inside stays as it is
        yield


@contextmanager
def keyed(model: nn.Module, key: Callable[[InputDropout], int | None]) -> Iterator[None]:
    """Inside, every dropout has another key."""
    with ExitStack() as undone:
        for dropout in input_dropouts(model):
            undone.callback(setattr, dropout, "tokens", dropout.tokens)
            undone.callback(setattr, dropout, "key", dropout.key)
            dropout.key = key(dropout)
        yield
