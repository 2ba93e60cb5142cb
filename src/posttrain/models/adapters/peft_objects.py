"""An adapter of peft that a model object holds: which it is, whether it is all that is trained, and its files.

peft writes the files itself, so that whatever it knows (DoRA, layers that are saved whole) is in them.
"""

import copy
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.peft_layers import peft_layers

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft's wrappers put before the names of a model's layers."""


def held_adapters(model: PreTrainedModel) -> dict[str, dict[str, Tensor]]:
    """The tensors of each adapter of peft, by its name and by theirs in peft's files, without `PREFIX`."""
    if not peft_layers(model):
        return {}
    from peft import get_peft_model_state_dict

    configs, everything = cast(Any, model).peft_config, model.state_dict(keep_vars=True)
    return {
        # Not "auto" for embeddings: that may ask the hub how many tokens the base has.
        name: get_peft_model_state_dict(model, everything, adapter_name=name, save_embedding_layers=False)
        for name in configs
    }


def trained_adapter(model: PreTrainedModel) -> str | None:
    """The adapter of peft whose tensors take a gradient; None where none does."""
    for name, tensors in held_adapters(model).items():
        if any(each.requires_grad for each in tensors.values()):
            return name
    return None


def require_whole_adapter(model: PreTrainedModel) -> None:
    """Refuse a model with layers of peft that trains what the files of one adapter would not hold."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not peft_layers(model) or not trained:
        return
    merged = [name for name, layer in peft_layers(model).items() if cast(Any, layer).merged]
    if merged:
        raise UserError(
            f"policy: the adapter of {merged[0]} is merged into its weights, so that it would take no gradient.  Call"
            " the PeftModel's unmerge_adapter() first."
        )
    name = trained_adapter(model)
    held = {} if name is None else held_adapters(model)[name]
    own = {id(each) for each in held.values()}
    others = [each for each, parameter in trained.items() if id(parameter) not in own]
    if others:
        beside = "without its adapters" if name is None else f"beside its adapter {name}"
        raise UserError(
            f"policy: {beside} the model trains {others[0]}{f' and {len(others) - 1} more' if len(others) > 1 else ''},"
            " which the files of an adapter do not hold, so the run could not save it.  Freeze it"
            " (requires_grad_(False)), or name its module in modules_to_save of the LoraConfig."
        )


def write_peft_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter that is trained as peft does.  The base is named by its folder, in full where it is here."""
    name = trained_adapter(model)
    assert name is not None, "a model whose adapter is trained"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{PREFIX}{key}": each.detach().cpu().clone() for key, each in held_adapters(model)[name].items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(cast(Any, model).peft_config[name])
    base = config.base_model_name_or_path or model.name_or_path or ""
    config.base_model_name_or_path = str(Path(base).resolve()) if base and Path(base).is_dir() else base
    config.inference_mode = True
    config.save_pretrained(str(folder))
