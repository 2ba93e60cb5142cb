"""Where a model's adapters go: layers named, found, and put in place."""

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import adaptable_layers, expert_matrices
from posttrain.models.adapters.experts import wrap_experts
from posttrain.models.adapters.lora import LoraLinear
from posttrain.models.adapters.peft_names import refused_by_peft
from posttrain.options.adapter import ALL_LINEAR, EXPERTS, AdapterOptions


def add_adapter(model: PreTrainedModel, options: AdapterOptions, *, seed: int) -> None:
    """Freeze the model and put an adapter beside each target.  Raises UserError where a target is no layer."""
    targets, experts = target_layers(model, options.targets), expert_matrices(model)
    model.requires_grad_(False)
    for name in targets:
        if name in experts:
            wrap_experts(model, name, options, seed=seed)
        else:
            put(model, name, LoraLinear(model.get_submodule(name), name, options, seed=seed))


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in place of the one of that name."""
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, layer)


def target_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """The names of the layers that the targets mean, and of arrays of experts, in the model's order."""
    names, experts = list(adaptable_layers(model)), list(expert_matrices(model))
    by_default = [name for name in names if not refused_by_peft(model, name)]
    wanted: set[str] = set()
    for target in targets:
        if target == EXPERTS and experts:
            wanted.update(experts)
            continue
        found = [name for name in (by_default if target == ALL_LINEAR else names) if meant(target, name)]
        if not found:
            raise UserError(f"model.adapter.targets: {no_such_layer(model, target, names)}")
        wanted.update(found)
    return [name for name in (*names, *experts) if name in wanted]


def meant(target: str, name: str) -> bool:
    """Whether a target means the layer of this name."""
    return target == ALL_LINEAR or f".{name}".endswith(f".{target}") or fnmatchcase(name, target)


def no_such_layer(model: PreTrainedModel, target: str, names: list[str]) -> str:
    """The end of a message about a target that means no linear layer, with those whose names are near."""
    if target == EXPERTS:
        return "experts: the model has none that are arrays of three dimensions.  Name linear layers."
    others = [name for name, _ in model.named_modules() if name and meant(target, name)]
    if others:
        rule = "has no adapter of its own: only linear layers have, but embeddings and the output layer have none"
        return f"{others[0]} is a {type(model.get_submodule(others[0])).__name__}, which {rule}."
    known = list(dict.fromkeys(ending for name in names for ending in endings(name)))
    near = get_close_matches(target, known, n=3, cutoff=0.5)
    kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {kinds or 'no linear layers'}."
    return f"{target} is none of the model's linear layers.  {hint}"


def endings(name: str) -> Iterator[str]:
    """By what names a layer can be meant, the shortest first: q_proj, self_attn.q_proj, ..."""
    parts = name.split(".")
    yield from (".".join(parts[start:]) for start in reversed(range(len(parts))))
