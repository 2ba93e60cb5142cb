"""LoRA layers of peft in a model object that a caller brings, read where they are plain: y = W·x + s·B·A·x.

peft itself is not needed: whoever has such a layer has imported it.
"""

import sys
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from posttrain.models.adapters.dropout import PeftDropout, TokenDropout
from posttrain.models.adapters.lora import Factors, LoraLinear
from posttrain.models.adapters.quantized import CLASS as LINEAR_4BIT

PLACE = "peft.tuners.lora."
KINDS = (PLACE + "layer.Linear", PLACE + "bnb.Linear4bit")
"""Classes of peft whose layers may be plain."""
BASES = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D", LINEAR_4BIT)


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer with a low-rank adapter, whoever made it."""

    base: nn.Linear | Conv1D
    factors: Factors | None
    """None while the adapter is off."""
    scale: float
    dropout: TokenDropout | None = None
    """What of the input the adapter does not see."""


def full_class_name(value: object) -> str:
    """A class as people look it up."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether this is a layer with a low-rank adapter, ours or peft's."""
    return isinstance(module, LoraLinear) or full_class_name(module) in KINDS


def has_peft() -> bool:
    """Whether peft is imported: whoever has a model with its layers has done so."""
    return "peft" in sys.modules


def adapted_names(model: nn.Module) -> frozenset[str]:
    """The names of a model's layers with an adapter."""
    return frozenset(name for name, module in model.named_modules() if is_adapter_layer(module))


def peft_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer of a model that peft has put there, plain or not, by name."""
    if not has_peft():
        return {}
    from peft.tuners.lora import LoraLayer

    kind: Any = LoraLayer  # a mixin, which is no module by itself
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def adapter_refusal(module: nn.Module) -> str | None:
    """What of such a layer is more than y = W·x + s·B·A·x, in words; None where nothing is."""
    base = cast(Any, module).base_layer
    if full_class_name(base) not in BASES:
        return f"has an adapter over a {full_class_name(base)}"
    if isinstance(module, LoraLinear):
        return None
    return more_than_plain(module)


def more_than_plain(module: nn.Module) -> str | None:
    """What of a layer of peft is more than y = W·x + s·B·A·x at evaluation, in words; None where nothing is."""
    layer: Any = module
    if layer.merged:
        return "has an adapter that is merged into its weights"
    if len(layer.active_adapters) != 1:
        return f"has {len(layer.active_adapters)} adapters at once"
    name = layer.active_adapters[0]
    if name in layer.lora_A and (layer.lora_variant or layer.lora_bias.get(name)):
        return "has an adapter that is more than plain LoRA"
    return None


def adapted_layer(module: nn.Module) -> AdaptedLayer | None:
    """What is in force of such a layer; None for any other."""
    if isinstance(module, LoraLinear):
        base = cast(nn.Linear | Conv1D, module.base_layer)
        return AdaptedLayer(base, module.factors(), module.scale, module.input_dropout.in_force(module.lora_A.device))
    if not is_adapter_layer(module):
        return None
    layer: Any = module
    name = layer.active_adapters[0]
    if layer.disable_adapters or name not in layer.lora_A:
        return AdaptedLayer(layer.base_layer, None, 0.0)
    factors = Factors(layer.lora_A[name].weight, layer.lora_B[name].weight)
    dropout = layer.lora_dropout[name]
    masks = dropout.input_dropout.in_force(factors.down.device) if isinstance(dropout, PeftDropout) else None
    return AdaptedLayer(layer.base_layer, factors, float(layer.scaling[name]), masks)


def take_dropouts(model: nn.Module) -> None:
    """Have the dropouts of peft's layers drop by token."""
    for name, adapter, dropout in torch_dropouts(model):
        cast(Any, model.get_submodule(name)).lora_dropout[adapter] = PeftDropout(dropout.p, name).eval()


def torch_dropouts(model: nn.Module) -> list[tuple[str, str, nn.Dropout]]:
    """The dropouts of peft's layers that drop as torch does: the layer's name, the adapter's and the dropout."""
    return [
        (name, adapter, dropout)
        for name, layer in peft_layers(model).items()
        for adapter, dropout in cast(Any, layer).lora_dropout.items()
        if type(dropout) is nn.Dropout
    ]
