"""peft's names of an adapter's layers, so that it finds them in the model that transformers loads from the folder.

They differ for two reasons.  A text model taken out of a multimodal one lies deeper in that one.  And peft reads
`target_modules` of some mixtures as if each expert were still a linear layer (transformers 4): names that end as
experts' matrices did become the experts.  So a dense layer or a shared expert there is named by its weight, in
`target_parameters`, which peft does not convert.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as CONVERSIONS

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
    inside: str
    """The decoder's name in the text model, such as `model`; empty if the text model is the decoder."""
    outside: str
    """Its name in the wrapper."""
    gap: float = 0.0
    """Largest difference of log-probs from the wrapper's, in nats, on a text of three tokens."""


def wrapper_of(model: nn.Module) -> Wrapper | None:
    """The wrapper that a text model was taken out of, None for any other model."""
    found = getattr(model, "taken_from", None)
    return found if isinstance(found, Wrapper) else None


def peft_name(model: nn.Module, layer: str) -> str:
    wrapper = wrapper_of(model)
    return layer if wrapper is None else moved(layer, wrapper.inside, wrapper.outside)


def text_model_name(model: nn.Module, name: str) -> str:
    """The reverse of `peft_name`; names that are already the text model's stay."""
    wrapper = wrapper_of(model)
    return name if wrapper is None else moved(name, wrapper.outside, wrapper.inside)


def moved(name: str, old: str, new: str) -> str:
    """A name below module `old` as a name below `new`; other names stay."""
    rest = f".{name}".removeprefix(f".{old}" if old else "")
    return name if old and rest == f".{name}" else f"{new}{rest}".lstrip(".")


def named_by_weight(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """The layers that peft would mistake for experts if they were named in `target_modules`."""
    if CONVERSIONS.get(family(model)) not in CONVERTED:
        return []
    return [layer for layer in layers if layer.rpartition(".")[2] in EXPERT_MATRICES]


def refused_by_peft(model: PreTrainedModel, layer: str) -> bool:
    return fnmatchcase(layer, REFUSED_LAYERS.get(family(model), ""))


def family(model: PreTrainedModel) -> str:
    """The `model_type` that peft sees: the wrapper's where there is one."""
    wrapper = wrapper_of(model)
    return str(model.config.model_type) if wrapper is None else wrapper.model_type
