"""LoRA layers of peft in a caller's model object, read if they are plain: y = W·x + s·B·A·x.

peft is not needed: whoever has such a layer has imported it.  `trained_adapter` and the functions after it treat an
adapter as a whole.  peft writes its files, so that everything it supports (DoRA, modules saved whole) is in them.

`peft_name` is a layer's name in these files.  It differs where a text model was taken out of a multimodal one.
And peft reads `target_modules` of some mixtures as if each expert were still a linear layer (transformers 4).  So a
dense layer or a shared expert with such a name is named by its weight, in `target_parameters`.
"""

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as CONVERSIONS
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.lora import Factors, LoraLinear, PeftDropout, TokenDropout

PLACE = "peft.tuners.lora."
KINDS = (PLACE + "layer.Linear", PLACE + "bnb.Linear4bit")
"""peft's classes whose layers may be plain."""
LINEAR_4BIT = "bitsandbytes.nn.modules.Linear4bit"
BASES = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D", LINEAR_4BIT)


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer with a low-rank adapter, whoever made it."""

    base: nn.Linear | Conv1D
    factors: Factors | None
    """None while the adapter is off."""
    scale: float
    dropout: TokenDropout | None = None


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_adapter_layer(module: nn.Module) -> bool:
    return isinstance(module, LoraLinear) or full_name(type(module)) in KINDS


def adapted_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, module in model.named_modules() if is_adapter_layer(module))


def peft_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer of peft in a model, plain or not, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    kind: Any = LoraLayer  # a mixin, which is not a module
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def adapter_refusal(module: nn.Module) -> str | None:
    """Why an adapter layer is more than y = W·x + s·B·A·x; None if it is not."""
    base = full_name(type(cast(Any, module).base_layer))
    if base not in BASES:
        return f"has an adapter over a {base}"
    return None if isinstance(module, LoraLinear) else more_than_plain(module)


def more_than_plain(module: nn.Module) -> str | None:
    """Why a peft layer is more than y = W·x + s·B·A·x at evaluation; None if it is not."""
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
    """The base and the matrices in force of an adapter layer; None for any other layer."""
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


def torch_dropouts(model: nn.Module) -> list[tuple[str, str, nn.Dropout]]:
    """torch's dropouts in peft's layers, each with the names of layer and adapter."""
    return [
        (name, adapter, dropout)
        for name, layer in peft_layers(model).items()
        for adapter, dropout in cast(Any, layer).lora_dropout.items()
        if type(dropout) is nn.Dropout
    ]


WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft's prefix of the names of a model's layers."""


def trained_adapter(model: PreTrainedModel) -> tuple[str | None, dict[str, Tensor]]:
    """The peft adapter that is trained, or None, and its tensors by their names in peft's files, without `PREFIX`."""
    if not peft_layers(model):
        return None, {}
    from peft import get_peft_model_state_dict

    everything = model.state_dict(keep_vars=True)
    for name in cast(Any, model).peft_config:
        # Not "auto" for embeddings: that may ask the hub how many tokens the base has.
        held = get_peft_model_state_dict(model, everything, adapter_name=name, save_embedding_layers=False)
        if any(each.requires_grad for each in held.values()):
            return name, held
    return None, {}


def require_whole_adapter(model: PreTrainedModel) -> None:
    """Refuse a model with peft layers that trains weights which one adapter's files would not hold."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not peft_layers(model) or not trained:
        return
    merged = [name for name, layer in peft_layers(model).items() if cast(Any, layer).merged]
    if merged:
        fault = f"the adapter of {merged[0]} is merged into its weights, so it would get no gradient"
        raise UserError(f"policy: {fault}.  Call the PeftModel's unmerge_adapter() first.")
    name, held = trained_adapter(model)
    own = {id(each) for each in held.values()}
    others = [each for each, parameter in trained.items() if id(parameter) not in own]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"policy: the model trains {others[0]}{more}, which are not in the files of its adapter"
            f"{'' if name is None else f' {name}'}.  Freeze them, or set modules_to_save of the LoraConfig."
        )


def write_peft_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the trained adapter as peft does.  The base is named by its folder, in full if it is on this machine."""
    name, held = trained_adapter(model)
    assert name is not None, "a model whose adapter is trained"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{key}": each.detach().cpu().clone() for key, each in held.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(cast(Any, model).peft_config[name])
    base = config.base_model_name_or_path or model.name_or_path or ""
    config.base_model_name_or_path = str(Path(base).resolve()) if base and Path(base).is_dir() else base
    config.inference_mode = True
    config.save_pretrained(str(folder))


CONVERTED = ("mixtral", "qwen2_moe")
"""transformers' conversions of files for which peft also converts the targets of an adapter."""
EXPERT_MATRICES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of the router and experts' matrices when each was a linear layer."""
REFUSED_LAYERS = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "*.out_proj"),
    "laguna": "*.shared_experts.*",
}
"""Layers whose adapters peft does not load, by family: out_proj, which fast kernels read directly, and names that it
mistakes for those of older files."""
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Wrapper:
    """The multimodal model that a text model was taken out of."""

    model_type: str
    inside: str = ""
    """The decoder's name in the text model, such as `model`; empty if the text model is the decoder."""
    outside: str = ""
    """Its name in the wrapper."""
    gap: float = 0.0
    """Largest difference of log-probs from the wrapper's, in nats, on a text of three tokens."""


def wrapper_of(model: nn.Module) -> Wrapper:
    """The wrapper that a text model was taken out of; for any other model, one without a name `outside`."""
    found = getattr(model, "taken_from", None)
    return found if isinstance(found, Wrapper) else Wrapper(str(cast(Any, model).config.model_type))


def peft_name(model: nn.Module, layer: str) -> str:
    return moved(layer, wrapper_of(model).inside, wrapper_of(model).outside)


def text_model_name(model: nn.Module, name: str) -> str:
    """The reverse of `peft_name`; names that are already the text model's stay."""
    return moved(name, wrapper_of(model).outside, wrapper_of(model).inside)


def moved(name: str, old: str, new: str) -> str:
    """A name below module `old` as a name below `new`; other names stay."""
    rest = f".{name}".removeprefix(f".{old}" if old else "")
    return name if old and rest == f".{name}" else f"{new}{rest}".lstrip(".")


def named_by_weight(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """The layers that peft would mistake for experts if they were named in `target_modules`."""
    if CONVERSIONS.get(wrapper_of(model).model_type) not in CONVERTED:
        return []
    return [layer for layer in layers if layer.rpartition(".")[2] in EXPERT_MATRICES]


def refused_by_peft(model: PreTrainedModel, layer: str) -> bool:
    return fnmatchcase(layer, REFUSED_LAYERS.get(wrapper_of(model).model_type, ""))
