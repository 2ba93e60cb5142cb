"""What a run has saved, by the names and shapes in its files alone: would transformers and peft load it?

No weight is read, so this takes milliseconds, and a run asks it of every folder that it saves.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_NAME

from posttrain.errors import RunError
from posttrain.models.adapters.experts import LoraExperts
from posttrain.models.adapters.lora import DOWN, UP, layer_shape, lora_layers
from posttrain.models.adapters.peft_names import WEIGHT, peft_name, wrapper_of
from posttrain.models.adapters.peft_objects import PREFIX, WEIGHTS
from posttrain.models.loading.construction import (
    LOAD_ERRORS,
    ONE_AT_A_TIME,
    first_words,
    lacking_weights,
    without_progress_bars,
)
from posttrain.options.adapter import ADAPTER_CONFIG

Shape = tuple[int, ...]


def require_loadable(model: PreTrainedModel, folder: Path) -> None:
    """Raise RunError where what this model was saved as, an adapter or a whole model, cannot be read again."""
    if (folder / ADAPTER_CONFIG).is_file():
        require_loadable_adapter(model, folder)
    else:
        require_loadable_model(model, folder)


def require_loadable_model(model: PreTrainedModel, folder: Path) -> None:
    """Raise RunError where transformers would make up weights of a folder that this model was saved in."""
    loader: Any = type(model)
    try:
        weights = {name: InFile(shape) for file in weight_files(folder) for name, shape in saved_shapes(file).items()}
        with without_progress_bars():
            config = type(model.config).from_pretrained(folder)
            _, found = loader.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except LOAD_ERRORS as error:
        raise not_loadable(folder, "transformers", first_words(error)) from error
    kinds = {
        "weights are missing or have another shape": lacking_weights(found),
        "weights have names that it does not know": sorted(found["unexpected_keys"]),
    }
    wrong = [f"{len(names)} {says} ({', '.join(names[:2])})" for says, names in kinds.items() if names]
    if wrong:
        raise not_loadable(folder, "transformers", "; ".join(wrong))


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads a model's weights from."""
    index = folder / f"{SAFE_WEIGHTS_NAME}.index.json"
    if not index.is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(named.values()))]


@dataclass(frozen=True, slots=True)
class InFile:
    """Stands for a tensor in a file where transformers loads it: read as one without memory, on the meta device."""

    shape: Shape

    def __getitem__(self, _: object) -> "InFile":
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of that shape on the meta device, whichever is asked for."""
        return torch.empty(self.shape, dtype=dtype, device="meta")


def require_loadable_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Raise RunError where peft would not find the layers of a saved adapter in the model below it.

    Asked of our own adapters of linear layers; peft writes the files of its own.
    """
    adapted = lora_layers(model)
    if not adapted:
        return
    experts = {peft_name(model, name) for name, layer in adapted.items() if isinstance(layer, LoraExperts)}
    layers = layers_of_base(model)
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    parameters = [name for name in settings.get("target_parameters", ()) if name.endswith(WEIGHT)]
    by_weight = [name.removesuffix(WEIGHT) for name in parameters]
    named = {*settings["target_modules"], *by_weight}
    written = saved_shapes(folder / WEIGHTS)
    in_file = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in written}
    for name in sorted((named | in_file) - experts):
        down, up = (written.get(f"{PREFIX}{name}.{which}{WEIGHT}") for which in (DOWN, UP))
        if name not in layers:
            raise not_loadable(folder, "peft", f"the model has no linear layer {name}")
        if name not in named or down is None or up is None:
            raise not_loadable(folder, "peft", f"{name} is not in both {ADAPTER_CONFIG} and {WEIGHTS}")
        if (up[0], down[1]) != layers[name]:
            raise not_loadable(
                folder, "peft", f"{name} is {[*layers[name]]} in the model, and {up[0]} by {down[1]} there"
            )


def layers_of_base(model: PreTrainedModel) -> Mapping[str, Shape]:
    """The linear layers, and their shapes, of the model that transformers loads from the base's folder."""
    base = cast(nn.Module, model)
    if wrapper_of(model) is not None:
        config = AutoConfig.from_pretrained(str(model.name_or_path))
        with ONE_AT_A_TIME, torch.device("meta"):
            base = AutoModelForImageTextToText.from_config(config)
    return {
        name.removesuffix(".base_layer"): layer_shape(layer)
        for name, layer in base.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }


def saved_shapes(file: Path) -> dict[str, Shape]:
    """The shapes of the tensors in a file, by its header."""
    with safe_open(file, framework="pt") as content:
        return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118


def not_loadable(folder: Path, reader: str, said: str) -> RunError:
    """What to raise of a folder that was saved and cannot be read."""
    return RunError(
        f"{folder}: {reader} would not load what was saved ({said}).  The folder is kept, and so are the run's"
        " checkpoints, which hold the trained weights.  This is a fault of posttrain or of that library: please report"
        " it with the model's name."
    )
