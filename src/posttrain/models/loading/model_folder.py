"""A policy from a model folder, or from the package."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from posttrain.errors import UserError
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter, read_adapter
from posttrain.models.adapters.placing import add_adapter
from posttrain.models.adapters.quantized import quantize
from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.loading.devices import chosen_device
from posttrain.models.policy import Policy, as_policy
from posttrain.options.adapter import ADAPTER_CONFIG, is_adapter_folder
from posttrain.options.model import BUNDLED, ModelOptions


def load_policy(options: ModelOptions, *, seed: int = 0, inference: bool = False) -> Policy:
    """Load a model folder, or that of an adapter with the model below it; then a new adapter is put over it, if asked.

    The seed draws a new adapter; `inference` is for a model that is never trained.  Raises UserError where the folder
    is missing or holds neither.
    """
    options.require_folder()
    if options.path == BUNDLED or not is_adapter_folder(options.folder):
        return with_adapter(load_model(options), options, None, seed=seed, inference=inference)
    saved = read_adapter(options.folder)
    try:
        below = load_model(replace(options, path=saved.base, adapter=options.adapter or saved.options))
    except UserError as error:
        where = f"base_model_name_or_path in {saved.folder / ADAPTER_CONFIG}"
        raise UserError(f"{where}: the model below the adapter cannot be had.  {error}") from error
    return with_adapter(below, options, saved, seed=seed, inference=inference)


def with_adapter(
    plain: Policy, options: ModelOptions, saved: SavedAdapter | None, *, seed: int, inference: bool
) -> Policy:
    """The policy with its linear layers in 4 bits and an adapter over them, as far as the options say so."""
    if not options.trains_adapter:
        return plain
    model, dtype = plain.model, plain.compute_dtype
    if options.quantization is not None:
        quantize(model, dtype, packed_kernel=inference and dtype == torch.bfloat16)
    if saved is not None:
        put_adapter(model, saved, options.adapter)
    elif options.adapter is not None:
        add_adapter(model, options.adapter, seed=seed)
    adapted = as_policy(model, plain.tokenizer, dtype=options.dtype)
    return replace(plain, forward=adapted.forward, forward_reason=adapted.forward_reason)


def load_model(options: ModelOptions) -> Policy:
    """Load the folder of a whole model.  Raises UserError where it is missing or holds no causal language model."""
    options.require_folder()
    device = chosen_device(options.device)
    folder = bundled_folder() if options.path == BUNDLED else options.folder
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
    return replace(as_policy(model, tokenizer, dtype=options.dtype), stored_dtype=stored)


def bundled_folder() -> Path:
    """The folder of the model that comes with the package."""
    folder = Path(str(files("posttrain") / "assets" / "countdown-base"))
    if not (folder / "model.safetensors").is_file():
        raise UserError(
            f"model.path = {BUNDLED}: this installation lacks the bundled model ({folder})."
            "  Make it with `posttrain sft recipes/countdown-base.yaml` and copy RUN/model there, or reinstall."
        )
    return folder
