"""An adapter as a folder in peft's format: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` reads these folders, and plain LoRA that peft saved is read here; peft
itself is not needed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters import lora, peft_layers
from posttrain.models.adapters.adaptable import expert_matrices, is_4_bit, linear_layers, target_layers
from posttrain.models.adapters.in_force import adapter_tensors
from posttrain.models.adapters.peft_layers import PREFIX, WEIGHT, WEIGHTS, peft_name, text_model_name
from posttrain.options.model import ADAPTER_CONFIG, ALL_LINEAR, AdapterOptions

PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
}
"""peft's settings of an adapter that is only y = W·x + s·B·A·x; other values are refused."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error)
"""Errors of reading damaged settings."""
BASE_IN_4_BITS = "base_in_4_bits.json"
"""The file in the folder of an adapter whose base was in 4 bits when it was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter as a folder holds it."""

    folder: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the file's name of the layer (see `peft_name`) and of the matrix."""

    @property
    def base(self) -> str:
        return str(self.settings["base_model_name_or_path"])

    @property
    def options(self) -> AdapterOptions:
        return AdapterOptions(
            rank=int(self.settings["r"]),
            alpha=float(self.settings["lora_alpha"]),
            dropout=float(self.settings.get("lora_dropout", 0.0)),
            rslora=bool(self.settings.get("use_rslora", False)),
            targets=tuple(self.layers),
        )

    @property
    def layers(self) -> list[str]:
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))

    @property
    def quantization(self) -> Literal["nf4"] | None:
        return "nf4" if (self.folder / BASE_IN_4_BITS).is_file() else None

    def alpha_of(self, layer: str) -> float:
        for pattern, value in (self.settings.get("alpha_pattern") or {}).items():
            if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in (layer, layer + WEIGHT)):
                return float(value)
        return self.options.alpha


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's adapter.  The base is named by its folder, in full if it is on this machine."""
    if not lora.lora_layers(model):
        peft_layers.write_peft_adapter(model, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in written_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = json.dumps(adapter_settings(model), indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(settings + "\n", encoding="utf-8")
    (folder / BASE_IN_4_BITS).unlink(missing_ok=True)
    if any(is_4_bit(layer) for layer in model.modules()):
        (folder / BASE_IN_4_BITS).write_text('{"quantization": "nf4"}\n', encoding="utf-8")


def written_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's own matrices, not copies, under the names of adapter_model.safetensors."""
    return {f"{PREFIX}{peft_name(model, name)}{WEIGHT}": each for name, each in adapter_tensors(model).items()}


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """The content of adapter_config.json; a rank or alpha other than the first layer's is in a pattern."""
    adapted = lora.lora_layers(model)
    first = next(iter(adapted.values())).options
    base = model.name_or_path or ""
    by_weight = peft_layers.named_by_weight(model, adapted)
    named = {name: peft_name(model, name) + (WEIGHT if name in by_weight else "") for name in adapted}
    experts = [name for name, layer in adapted.items() if isinstance(layer, lora.LoraExperts)]
    for name in experts:
        array = cast(lora.LoraExperts, adapted[name]).parameter
        named[name] = f"{peft_name(model, lora.without_wrappers(name))}.{array}"
    layers = {named[name]: layer for name, layer in adapted.items()}
    parameters = sorted(named[name] for name in (*by_weight, *experts))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()) if base and Path(base).is_dir() else base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": alpha_number(first.alpha),
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "target_modules": sorted(set(layers) - set(parameters)),
        **({"target_parameters": parameters} if parameters else {}),
        "rank_pattern": {name: each.options.rank for name, each in layers.items() if each.options.rank != first.rank},
        "alpha_pattern": {
            name: alpha_number(each.options.alpha) for name, each in layers.items() if each.options.alpha != first.alpha
        },
        "fan_in_fan_out": any(isinstance(layer.base_layer, Conv1D) for layer in layers.values()),
        "init_lora_weights": True,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }


def alpha_number(number: float) -> float | int:
    return int(number) if number == int(number) else number


def read_adapter(folder: Path) -> SavedAdapter:
    """Read a folder in peft's format.  Raises UserError if it is damaged, or more than plain LoRA."""
    where = f"model.path = {folder}"
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        fault = f"the adapter cannot be read ({error})"
        raise UserError(f"{where}: {fault}.  It needs {ADAPTER_CONFIG} and {WEIGHTS}, as peft saves them.") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise UserError(f"{where}: its adapter is of type {kind}, and only LORA is read.  Merge it with peft first.")
    saved = plain_lora(folder, settings, tensors, where)
    if not settings.get("base_model_name_or_path"):
        raise UserError(f"{where}: {ADAPTER_CONFIG} lacks base_model_name_or_path.  Write the base's folder there.")
    try:
        for layer in saved.layers:
            replace(saved.options, alpha=saved.alpha_of(layer))
        "".join(settings.get("target_parameters") or ())  # which are texts
    except UserError:
        raise
    except UNREADABLE as error:
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{where}: {ADAPTER_CONFIG} cannot be read ({said}).  Copy the file again.") from error
    return saved


def plain_lora(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> SavedAdapter:
    """An adapter of these settings and tensors of its files.  Raises UserError if it is more than plain LoRA."""
    faults = [f"{name} = {settings[name]!r}" for name, good in PLAIN.items() if settings.get(name, good[0]) not in good]
    made = {}
    for name, tensor in tensors.items():
        made[name.removeprefix(PREFIX).removesuffix(WEIGHT)] = tensor
        if not name.startswith(PREFIX) or name.removesuffix(WEIGHT).rpartition(".")[2] not in (lora.DOWN, lora.UP):
            faults.append(f"{name} in {WEIGHTS}")
    if faults:
        remedy = "Merge it with peft first, or give the model object in Python to posttrain.as_policy."
        raise UserError(f"{where}: its adapter is more than plain LoRA: it has {faults[0]}.  {remedy}")
    return SavedAdapter(folder=folder, settings=settings, tensors=made)


def unread_reason(model: PreTrainedModel) -> str | None:
    """Why the peft adapter that a model trains could not be loaded from its folder here; None if it could."""
    name, held = peft_layers.trained_adapter(model)
    if name is None:
        return None
    settings = cast(Any, model).peft_config[name].to_dict()
    tensors = {f"{PREFIX}{key}": each for key, each in held.items()}
    try:
        wrapped_arrays(model, plain_lora(Path(), settings, tensors, "model"), "model")
    except UserError as error:
        return str(error)
    return None


def wrapped_arrays(model: PreTrainedModel, saved: SavedAdapter, where: str) -> dict[str, str]:
    """The file's layers that wrap arrays of experts, each with its array by the model's name, in the model's order."""
    known = list(expert_matrices(model))
    arrays: list[str] = []
    for parameter in saved.settings.get("target_parameters") or ():
        found = [name for name in known if f".{name}".endswith(f".{text_model_name(model, parameter)}")]
        if not found and not (parameter.endswith(WEIGHT) and parameter.removesuffix(WEIGHT) in saved.layers):
            raise UserError(
                f"{where}: target_parameters of its adapter has {parameter}, which is neither the weight of a linear"
                " layer nor an array of experts.  Merge it with peft first."
            )
        arrays += found
    wrapped: dict[str, str] = {}
    for path, within in groupby((name for name in known if name in arrays), key=lambda name: name.rpartition(".")[0]):
        names = list(within)
        for place, array in enumerate(names, start=1):  # the last array's wrapper is outermost
            wrapped[peft_name(model, path + ".base_layer" * (len(names) - place))] = array
    return wrapped


def put_adapter(model: PreTrainedModel, saved: SavedAdapter, options: AdapterOptions | None) -> None:
    """Put a saved adapter over its base.  A recipe's `options` may change its dropout; everything else must agree."""
    where = f"model.path = {saved.folder}"
    saved = of_text_part(model, saved, where)
    known, arrays = linear_layers(model), wrapped_arrays(model, saved, where)
    if options is not None:
        require_same_adapter(model, saved, options, arrays)
    model.requires_grad_(False)
    for layer in (*(each for each in saved.layers if each not in arrays), *arrays):
        name = text_model_name(model, layer)
        if layer not in arrays and name not in known:
            raise UserError(
                f"{where}: its adapter is for {layer}, and its base {saved.base} has no such linear layer.  Write the"
                f" folder of its base into {ADAPTER_CONFIG}, as base_model_name_or_path."
            )
        of_layer = saved.options if options is None else replace(saved.options, dropout=options.dropout)
        if layer in arrays:
            made: lora.LoraLinear = lora.wrap_experts(model, arrays[layer], of_layer, seed=0)
        else:
            rank = len(saved.tensors[f"{layer}.{lora.DOWN}"])
            of_layer = replace(of_layer, rank=rank, alpha=saved.alpha_of(layer))
            made = lora.LoraLinear(model.get_submodule(name), name, of_layer, seed=0)
            lora.put_layer(model, name, made)
        fill(made, layer, saved, where)


def of_text_part(model: PreTrainedModel, saved: SavedAdapter, where: str) -> SavedAdapter:
    """The adapter without the layers outside a wrapper's text part.

    peft adds those for `all-linear`, and text does not train them: B stays 0.  Raises UserError if it was trained.
    """
    if not peft_layers.wrapper_of(model).outside:
        return saved
    here = dict(model.named_modules())
    outside = [layer for layer in saved.layers if text_model_name(model, layer) == layer and layer not in here]
    trained = [layer for layer in outside if saved.tensors.get(f"{layer}.{lora.UP}", torch.ones(1)).any()]
    if trained:
        fault = f"its adapter has trained {trained[0]}, which is outside the text part of its base {saved.base}"
        raise UserError(f"{where}: {fault}.  Merge the adapter with peft first.")
    kept = {name: each for name, each in saved.tensors.items() if name.rpartition(".")[0] not in outside}
    return replace(saved, tensors=kept)


def fill(made: lora.LoraLinear, layer: str, saved: SavedAdapter, where: str) -> None:
    """Copy the saved matrices of a layer into it.  Raises UserError if one is missing or of another shape."""
    for which, parameter in ((lora.DOWN, made.lora_A), (lora.UP, made.lora_B)):
        given = saved.tensors.get(f"{layer}.{which}")
        if given is None or given.shape != parameter.shape:
            shape = "missing" if given is None else f"of shape {[*given.shape]}"
            fault = f"{layer}.{which} is {shape}, and its base {saved.base} needs {[*parameter.shape]}"
            raise UserError(f"{where}: {fault}.  Write the folder of its base into {ADAPTER_CONFIG}.")
        parameter.data.copy_(given)


def require_same_adapter(
    model: PreTrainedModel, saved: SavedAdapter, options: AdapterOptions, arrays: Mapping[str, str]
) -> None:
    """Refuse options that differ from the saved adapter's; default targets mean its layers."""
    fault = ""
    for name in ("rank", "alpha", "rslora"):
        given, there = getattr(options, name), getattr(saved.options, name)
        if given != there:
            fault = fault or f"{name} = {given}, and the adapter in {saved.folder} has {there}"
    if not fault and options.targets != (ALL_LINEAR,):
        there = {arrays[layer] if layer in arrays else text_model_name(model, layer) for layer in saved.layers}
        differing = there ^ set(target_layers(model, options.targets))
        if differing:
            targets = ", ".join(options.targets)
            fault = f"targets = {targets}: the adapter in {saved.folder} differs in {min(differing)}"
    if fault:
        remedy = "Remove model.adapter to continue that adapter, or start from its base."
        raise UserError(f"model.adapter.{fault}.  {remedy}")
