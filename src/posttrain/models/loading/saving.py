"""A policy as a folder that transformers reads."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_format import write_adapter
from posttrain.models.adapters.quantized import is_4_bit, merged_weights
from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.policy import Policy
from posttrain.options.adapter import ADAPTER_CONFIG


def save_adapter(policy: Policy, folder: Path) -> None:
    """Write the adapter alone, in peft's format, and the tokenizer."""
    write_adapter(policy.model, folder)
    with without_progress_bars():
        policy.tokenizer.save_pretrained(folder)
    readable_as(folder / ADAPTER_CONFIG, folder)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write model and tokenizer; weights that were loaded from bfloat16 are bfloat16 again, and config.json says so.

    An adapter is added into a copy of the weights, in float32; those in 4 bits are what their numbers stand for.
    """
    model, dtype = policy.model, policy.stored_dtype
    adapted = lora_layers(model) or any(is_4_bit(layer) for layer in model.modules())
    weights = merged_weights(model, dtype) if adapted else model.state_dict()
    with without_progress_bars():
        if dtype is None or dtype == model.dtype:
            model.save_pretrained(folder, state_dict=weights if adapted else None)
        else:
            held = model.dtype
            model.save_pretrained(folder, state_dict=in_dtype(weights, dtype))
            model.config.dtype = dtype
            model.config.save_pretrained(folder)
            model.config.dtype = held
        policy.tokenizer.save_pretrained(folder)
    readable_as(folder / "config.json", folder)


def in_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in another floating-point type; those that are one tensor under two names stay one."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: made.setdefault((value.data_ptr(), value.shape), value.detach().to(dtype))
        if value.is_floating_point()
        else value
        for name, value in weights.items()
    }


def readable_as(example: Path, folder: Path) -> None:
    """Give every file of a folder the mode of one that was made as files are: safetensors' own are their owner's."""
    mode = example.stat().st_mode & 0o777
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)
