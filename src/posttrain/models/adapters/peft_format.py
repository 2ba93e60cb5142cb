"""An adapter as a folder in peft's format: adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(base, folder)` reads what is written here, and what peft has saved is read here, as far
as it is plain LoRA; peft itself is not needed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import expert_matrices, linear_layers, put_layer, target_layers
from posttrain.models.adapters.in_force import adapter_tensors
from posttrain.models.adapters.lora import (
    DOWN,
    UP,
    LoraExperts,
    LoraLinear,
    lora_layers,
    without_wrappers,
    wrap_experts,
    wrapper_names,
)
from posttrain.models.adapters.peft_layers import PREFIX, WEIGHTS, held_adapters, trained_adapter, write_peft_adapter
from posttrain.models.adapters.peft_names import WEIGHT, named_by_weight, peft_name, text_model_name, wrapper_of
from posttrain.models.adapters.quantized import is_4_bit
from posttrain.options.adapter import ADAPTER_CONFIG, ALL_LINEAR, AdapterOptions

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
"""What peft's settings are in an adapter that is y = W·x + s·B·A·x and no more; others are refused by name."""


UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error)
"""What reading settings of other kinds than peft's raises."""
BASE_IN_4_BITS = "base_in_4_bits.json"
"""The file that stands beside an adapter whose base was in 4 bits when it was trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAdapter:
    """An adapter as a folder holds it."""

    folder: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By the file's name of the layer (see `peft_names`), and which of the two matrices it is."""

    @property
    def base(self) -> str:
        """The path or name of the model that it was trained over."""
        return str(self.settings["base_model_name_or_path"])

    @property
    def options(self) -> AdapterOptions:
        """What it is, in our words."""
        return AdapterOptions(
            rank=int(self.settings["r"]),
            alpha=float(self.settings["lora_alpha"]),
            dropout=float(self.settings.get("lora_dropout", 0.0)),
            rslora=bool(self.settings.get("use_rslora", False)),
            targets=tuple(self.layers),
        )

    @property
    def layers(self) -> list[str]:
        """Its layers, by the file's names."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))

    @property
    def quantization(self) -> Literal["nf4"] | None:
        """In how many bits its base was, which peft's format does not say."""
        return "nf4" if (self.folder / BASE_IN_4_BITS).is_file() else None

    def options_of(self, layer: str) -> AdapterOptions:
        """Those of one layer, which peft lets have its own rank and alpha."""
        return replace(self.options, rank=len(self.tensors[f"{layer}.{DOWN}"]), alpha=self.alpha_of(layer))

    def alpha_of(self, layer: str) -> float:
        return next(
            (
                float(value)
                for pattern, value in (self.settings.get("alpha_pattern") or {}).items()
                if re.fullmatch(rf"(.*\.)?({pattern})", layer) or re.fullmatch(rf"(.*\.)?({pattern})", layer + WEIGHT)
            ),
            self.options.alpha,
        )


# Writing


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the model's adapter as it is now.  The base is named by its folder, in full where it is on this machine."""
    if not lora_layers(model):
        write_peft_adapter(model, folder)
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
    """The matrices of the adapter under the names of adapter_model.safetensors; they go on changing."""
    return {f"{PREFIX}{peft_name(model, name)}{WEIGHT}": each for name, each in adapter_tensors(model).items()}


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """The content of adapter_config.json; a layer whose rank or alpha is not the first one's is named apart."""
    adapted = lora_layers(model)
    first = next(iter(adapted.values())).options
    base = model.name_or_path or ""
    by_weight = named_by_weight(model, adapted)
    named = {name: peft_name(model, name) + (WEIGHT if name in by_weight else "") for name in adapted}
    experts = [name for name, layer in adapted.items() if isinstance(layer, LoraExperts)]
    for name in experts:
        named[name] = f"{peft_name(model, without_wrappers(name))}.{cast(LoraExperts, adapted[name]).parameter}"
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
    require_plain(settings, where)
    if not settings.get("base_model_name_or_path"):
        raise UserError(
            f"{where}: {ADAPTER_CONFIG} does not name the model below the adapter.  Write its folder there, as"
            " base_model_name_or_path."
        )
    named = named_as_in_file(tensors, where)
    saved = SavedAdapter(folder=folder, settings=settings, tensors=named)
    try:
        for layer in saved.layers:
            replace(saved.options, alpha=saved.alpha_of(layer))
        "".join(settings.get("target_parameters") or ())  # which are texts
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"{where}: {ADAPTER_CONFIG} cannot be read ({type(error).__name__}: {error}).  Copy it anew from where the"
            " adapter comes from."
        ) from error
    return saved


def require_plain(settings: Mapping[str, Any], where: str) -> None:
    """Refuse settings of an adapter that is more than plain LoRA."""
    for name, plain in PLAIN.items():
        if name in settings and settings[name] not in plain:
            raise UserError(
                f"{where}: its adapter has {name} = {settings[name]!r}, which is more than plain LoRA.  Merge it with"
                " peft first, or give the model object in Python to posttrain.as_policy."
            )


def unread_reason(model: PreTrainedModel) -> str | None:
    """Why the adapter of peft that a model trains could not be loaded from its folder here; None where it could."""
    name = trained_adapter(model)
    if name is None:
        return None
    settings = cast(Any, model).peft_config[name].to_dict()
    tensors = {f"{PREFIX}{key}": each for key, each in held_adapters(model)[name].items()}
    try:
        require_plain(settings, "model")
        saved = SavedAdapter(folder=Path(), settings=settings, tensors=named_as_in_file(tensors, "model"))
        wrapped_arrays(model, saved, "model")
    except UserError as error:
        return str(error)
    return None


def named_as_in_file(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The matrices by the names of their layers; anything else in the file is refused."""
    made = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX).removesuffix(".weight")
        if not name.startswith(PREFIX) or plain.rpartition(".")[2] not in (DOWN, UP):
            raise UserError(f"{where}: {WEIGHTS} holds {name}, which is not a LoRA matrix.  Merge it with peft first.")
        made[plain] = tensor
    return made


def wrapped_arrays(model: PreTrainedModel, saved: SavedAdapter, where: str) -> dict[str, str]:
    """The file's layers that are wrappers of arrays of experts, and the arrays by the model's names, in its order.

    Raises UserError where a parameter that the adapter targets is neither such an array nor the weight of a layer.
    """
    known = list(expert_matrices(model))
    arrays: list[str] = []
    for parameter in saved.settings.get("target_parameters") or ():
        found = [name for name in known if f".{name}".endswith(f".{text_model_name(model, parameter)}")]
        if not found and not (parameter.endswith(WEIGHT) and parameter.removesuffix(WEIGHT) in saved.layers):
            raise UserError(
                f"{where}: its adapter has target_parameters = {parameter}, which is neither the weight of a linear"
                " layer nor an array of experts here.  Merge it with peft first."
            )
        arrays += found
    arrays = [name for name in known if name in arrays]
    return {peft_name(model, wrapper): array for array, wrapper in wrapper_names(arrays).items()}


def put_adapter(model: PreTrainedModel, saved: SavedAdapter, options: AdapterOptions | None) -> None:
    """Put a saved adapter over its base, to be used or trained on.  Raises UserError where it does not fit.

    `options` are those that a recipe gives as well: they may change the dropout, and what else they say must hold.
    """
    where = f"model.path = {saved.folder}"
    saved = of_text_part(model, saved, where)
    require_same_kind(saved, options, where)
    require_same_layers(model, saved, options, where)
    known, arrays = linear_layers(model), wrapped_arrays(model, saved, where)
    model.requires_grad_(False)
    for layer in (*(each for each in saved.layers if each not in arrays), *arrays):
        name = text_model_name(model, layer)
        if layer not in arrays and name not in known:
            raise UserError(
                f"{where}: its adapter is for {layer}, and its base {saved.base} has no such linear layer.  Put the"
                f" folder of the model that it was trained over into {ADAPTER_CONFIG}, as base_model_name_or_path."
            )
        of_layer = saved.options if layer in arrays else saved.options_of(layer)
        of_layer = of_layer if options is None else replace(of_layer, dropout=options.dropout)
        if layer in arrays:
            made: LoraLinear = wrap_experts(model, arrays[layer], of_layer, seed=0)
        else:
            made = LoraLinear(model.get_submodule(name), name, of_layer, seed=0)
            put_layer(model, name, made)
        fill(made, layer, saved, where)


def of_text_part(model: PreTrainedModel, saved: SavedAdapter, where: str) -> SavedAdapter:
    """The adapter without the layers that a wrapper has beside its text part, where they change nothing.

    peft puts them there for `all-linear`, and text trains none: B stays 0.  Raises UserError for one that was trained.
    """
    if wrapper_of(model) is None:
        return saved
    here = dict(model.named_modules())
    outside = [layer for layer in saved.layers if text_model_name(model, layer) == layer and layer not in here]
    trained = [layer for layer in outside if saved.tensors.get(f"{layer}.{UP}", torch.ones(1)).any()]
    if trained:
        raise UserError(
            f"{where}: its adapter has trained {trained[0]}, which its base {saved.base} does not have in its text"
            " part, and only that is loaded here.  Merge the adapter with peft first."
        )
    kept = {name: each for name, each in saved.tensors.items() if name.rpartition(".")[0] not in outside}
    return replace(saved, tensors=kept)


def fill(made: LoraLinear, layer: str, saved: SavedAdapter, where: str) -> None:
    """Put the saved matrices of a layer into it.  Raises UserError where they are missing or of another shape."""
    for which, parameter in ((DOWN, made.lora_A), (UP, made.lora_B)):
        given = saved.tensors.get(f"{layer}.{which}")
        if given is None or given.shape != parameter.shape:
            shape = "missing" if given is None else f"of shape {[*given.shape]}"
            raise UserError(
                f"{where}: {layer}.{which} is {shape}, and its base {saved.base} asks for {[*parameter.shape]}."
                "  It was trained over another model."
            )
        parameter.data.copy_(given)


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


def require_same_layers(
    model: PreTrainedModel, saved: SavedAdapter, options: AdapterOptions | None, where: str
) -> None:
    """Refuse targets that are named and mean other layers than those of the adapter which is there."""
    if options is None or options.targets == (ALL_LINEAR,):
        return
    arrays = wrapped_arrays(model, saved, where)
    asked = set(target_layers(model, options.targets))
    there = {arrays[layer] if layer in arrays else text_model_name(model, layer) for layer in saved.layers}
    if asked != there:
        raise UserError(
            f"model.adapter.targets = {', '.join(options.targets)}: the adapter in {where} is on other layers"
            f" ({min(asked ^ there)} is one that differs).  Leave model.adapter out to go on with it as it is, or start"
            " from its base."
        )
