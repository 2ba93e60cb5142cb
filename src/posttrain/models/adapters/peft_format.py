"""An adapter as a folder in peft's format: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` reads what is written here, and what peft has saved is read here, as far
as it is plain LoRA; peft itself is not needed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.lora import DOWN, UP, LoraLinear, adapter_tensors, lora_layers
from posttrain.models.adapters.placing import linear_layers, put
from posttrain.options.adapter import ADAPTER_CONFIG, AdapterOptions

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft's wrappers put before the names of a model's layers."""
PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
}
"""What peft's settings are in an adapter that is y = W·x + s·B·A·x and no more; others are refused by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter as a folder holds it."""

    folder: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the model's own name of the layer, and which of the two matrices it is."""

    @property
    def base(self) -> str:
        """The path or name of the model that it was trained over."""
        return str(self.settings["base_model_name_or_path"])

    @property
    def options(self) -> AdapterOptions:
        """What it is, in our words."""
        layers = dict.fromkeys(name.rpartition(".")[0] for name in self.tensors)
        return AdapterOptions(
            rank=int(self.settings["r"]),
            alpha=float(self.settings["lora_alpha"]),
            dropout=float(self.settings.get("lora_dropout", 0.0)),
            rslora=bool(self.settings.get("use_rslora", False)),
            targets=tuple(layers),
        )

    def options_of(self, layer: str) -> AdapterOptions:
        """Those of one layer, which peft lets have a rank and an alpha of its own."""
        alpha = next(
            (
                float(value)
                for pattern, value in (self.settings.get("alpha_pattern") or {}).items()
                if re.fullmatch(rf"(.*\.)?({pattern})", layer)
            ),
            self.options.alpha,
        )
        return replace(self.options, rank=len(self.tensors[f"{layer}.{DOWN}"]), alpha=alpha)


# Writing


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's adapter as it is now.  The base is named by its folder, in full where it is on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{name}.weight": tensor.cpu().contiguous() for name, tensor in adapter_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = json.dumps(adapter_settings(model), indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(settings + "\n", encoding="utf-8")


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """The content of adapter_config.json; a layer whose rank or alpha is not the first one's is named apart."""
    layers = lora_layers(model)
    first = next(iter(layers.values())).options
    base = model.name_or_path or ""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).resolve()) if base and Path(base).is_dir() else base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": whole(first.alpha),
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "target_modules": sorted(layers),
        "rank_pattern": {name: each.options.rank for name, each in layers.items() if each.options.rank != first.rank},
        "alpha_pattern": {
            name: whole(each.options.alpha) for name, each in layers.items() if each.options.alpha != first.alpha
        },
        "fan_in_fan_out": any(isinstance(layer.base_layer, Conv1D) for layer in layers.values()),
        "init_lora_weights": True,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }


def whole(number: float) -> float | int:
    """A whole number as such, as peft writes alpha."""
    return int(number) if number == int(number) else number


# Reading


def read_adapter(folder: Path) -> SavedAdapter:
    """What a folder in peft's format holds.  Raises UserError where that is damaged, or more than plain LoRA."""
    where = f"model.path = {folder}"
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{where}: no adapter that can be read ({error}).  It needs {ADAPTER_CONFIG} and {WEIGHTS}, as"
            " peft saves them."
        ) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise UserError(f"{where}: its adapter is of type {kind}, and only LORA is read.  Merge it with peft first.")
    for name, plain in PLAIN.items():
        if name in settings and settings[name] not in plain:
            raise UserError(
                f"{where}: its adapter has {name} = {settings[name]!r}, which is more than plain LoRA.  Merge it with"
                " peft first, or give the model object in Python to posttrain.as_policy."
            )
    if not settings.get("base_model_name_or_path"):
        raise UserError(
            f"{where}: {ADAPTER_CONFIG} does not name the model below the adapter.  Write its folder there, as"
            " base_model_name_or_path."
        )
    return SavedAdapter(folder=folder, settings=settings, tensors=named_as_in_model(tensors, where))


def named_as_in_model(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The matrices by the model's names of their layers; anything else in the file is refused."""
    made = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX).removesuffix(".weight")
        if not name.startswith(PREFIX) or plain.rpartition(".")[2] not in (DOWN, UP):
            raise UserError(f"{where}: {WEIGHTS} holds {name}, which is no matrix of LoRA.  Merge it with peft first.")
        made[plain] = tensor
    return made


def put_adapter(model: PreTrainedModel, saved: SavedAdapter, options: AdapterOptions | None) -> None:
    """Put a saved adapter over its base, to be used or trained on.  Raises UserError where it does not fit.

    `options` are those that a recipe gives as well: they may change the dropout, and what else they say must hold.
    """
    where = f"model.path = {saved.folder}"
    require_same_kind(saved, options, where)
    known = linear_layers(model)
    model.requires_grad_(False)
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in saved.tensors):
        if layer not in known:
            raise UserError(
                f"{where}: its adapter is for {layer}, and its base {saved.base} has no such linear layer.  Put the"
                f" folder of the model that it was trained over into {ADAPTER_CONFIG}, as base_model_name_or_path."
            )
        of_layer = saved.options_of(layer)
        made = LoraLinear(
            model.get_submodule(layer),
            layer,
            of_layer if options is None else replace(of_layer, dropout=options.dropout),
            seed=0,
        )
        for which, parameter in ((DOWN, made.lora_A), (UP, made.lora_B)):
            given = saved.tensors.get(f"{layer}.{which}")
            if given is None or given.shape != parameter.shape:
                shape = "missing" if given is None else f"of shape {[*given.shape]}"
                raise UserError(
                    f"{where}: {layer}.{which} is {shape}, and its base {saved.base} asks for {[*parameter.shape]}."
                    "  It was trained over another model."
                )
            parameter.data.copy_(given)
        put(model, layer, made)


def require_same_kind(saved: SavedAdapter, options: AdapterOptions | None, where: str) -> None:
    """Refuse options of an adapter that are not those of the one which is there."""
    if options is None:
        return
    for name in ("rank", "alpha", "rslora"):
        given, there = getattr(options, name), getattr(saved.options, name)
        if given != there:
            raise UserError(
                f"model.adapter.{name} = {given}, and the adapter in {where} has {there}.  Leave model.adapter out to"
                " go on with it as it is, or start from its base."
            )
