"""A policy from a model folder, or from the package."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import UserError
from posttrain.models.loading.chat_template import with_chat_template
from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.loading.devices import chosen_device
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import BUNDLED, ModelOptions


def load_policy(options: ModelOptions) -> Policy:
    """Load a model folder.  Raises UserError where it is missing or holds no causal language model."""
    options.require_files()
    device = chosen_device(options.device)
    folder = bundled_folder() if options.path == BUNDLED else Path(options.path)
    try:
        config = AutoConfig.from_pretrained(folder)
        stored = config.dtype
        with without_progress_bars():  # they would write over ours
            model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path = {options.path}: transformers cannot load it as a causal language model ({error})."
            "  The folder needs config.json, model.safetensors, tokenizer.json and tokenizer_config.json."
        ) from error
    cast(torch.nn.Module, model).to(device)
    tokenizer_as_asked = with_chat_template(tokenizer, options.chat_template)
    return replace(as_policy(model, tokenizer_as_asked, dtype=options.dtype), stored_dtype=stored)


def bundled_folder() -> Path:
    """The folder of the model that comes with the package."""
    folder = Path(str(files("posttrain") / "assets" / "countdown-base"))
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"model.path = {BUNDLED}: this installation lacks the bundled model ({folder})."
            "  Make it with `posttrain sft recipes/countdown-base.yaml` and copy RUN/model there, or reinstall."
        )
    return folder
