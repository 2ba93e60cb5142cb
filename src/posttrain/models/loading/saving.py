"""A policy as a folder that transformers reads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.policy import Policy, stop_ids


def save_policy(policy: Policy, folder: Path) -> None:
    """Write model and tokenizer; weights that were loaded from bfloat16 are bfloat16 again, and config.json says so."""
    model, dtype = policy.model, policy.stored_dtype
    with without_progress_bars():
        if dtype is None or {each.dtype for each in model.parameters() if each.is_floating_point()} == {dtype}:
            model.save_pretrained(folder)
        else:
            held = model.dtype
            model.save_pretrained(folder, state_dict=in_dtype(model.state_dict(), dtype))
            model.config.dtype = dtype
            model.config.save_pretrained(folder)
            model.config.dtype = held
        policy.tokenizer.save_pretrained(folder)
    save_code(policy, folder)
    save_stop_ids(policy, folder)
    readable_as(folder / "config.json", folder)


def save_code(policy: Policy, folder: Path) -> None:
    """Copy the Python code that a model's folder brought, so that the one that is saved can be loaded again."""
    source = Path(policy.model.name_or_path or "")
    if hasattr(policy.model.config, "auto_map") and source.is_dir():
        for file in source.glob("*.py"):
            shutil.copyfile(file, folder / file.name)


def save_stop_ids(policy: Policy, folder: Path) -> None:
    """Name the stop tokens that the model did not name itself, in its generation config: it was trained to use them."""
    if policy.stop_ids != stop_ids(policy.model, policy.tokenizer):
        file = folder / "generation_config.json"
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        content["eos_token_id"] = list(policy.stop_ids)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
