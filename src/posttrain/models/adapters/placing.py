"""Where a model's adapters go: layers named, found, and put in place."""

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.lora import LoraLinear
from posttrain.options.adapter import ALL_LINEAR, AdapterOptions


def add_adapter(model: PreTrainedModel, options: AdapterOptions, *, seed: int) -> None:
    """Freeze the model and put an adapter beside each target.  Raises UserError where a target is no layer."""
    targets = target_layers(model, options.targets)
    model.requires_grad_(False)
    for name in targets:
        put(model, name, LoraLinear(model.get_submodule(name), name, options, seed=seed))


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in place of the one of that name."""
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, layer)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer but embeddings and output layer, those with an adapter by what is below it."""
    head = model.get_output_embeddings()
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def target_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> list[str]:
    """The names of the layers that the targets mean, in the model's order."""
    names = list(linear_layers(model))
    wanted: set[str] = set()
    for target in targets:
        found = [name for name in names if meant(target, name)]
        if not found:
            raise UserError(f"model.adapter.targets: {no_such_layer(model, target, names)}")
        wanted.update(found)
    return [name for name in names if name in wanted]


def meant(target: str, name: str) -> bool:
    """Whether a target means the layer of this name."""
    return target == ALL_LINEAR or f".{name}".endswith(f".{target}") or fnmatchcase(name, target)


def no_such_layer(model: PreTrainedModel, target: str, names: list[str]) -> str:
    """The end of a message about a target that means no linear layer, with those whose names are near."""
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
