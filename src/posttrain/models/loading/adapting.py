"""Adapters over a model that was loaded: a new one, or one that a folder holds."""

from dataclasses import replace

from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.lora import drops
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter
from posttrain.models.adapters.placing import add_adapter
from posttrain.models.recomputation import is_recomputing
from posttrain.options.adapter import ADAPTER_CONFIG, AdapterOptions
from posttrain.options.model import ModelOptions


def base_options(options: ModelOptions, saved: SavedAdapter) -> ModelOptions:
    """How the model below a saved adapter is loaded: by the path that the adapter names."""
    try:
        below = replace(options, path=saved.base, adapter=options.adapter or AdapterOptions())
        below.require_folder()
    except UserError as error:
        where = f"base_model_name_or_path in {saved.folder / ADAPTER_CONFIG}"
        raise UserError(f"{where}: the model below the adapter cannot be had.  {error}") from error
    return below


def put_over(model: PreTrainedModel, options: ModelOptions, saved: SavedAdapter | None, *, seed: int) -> None:
    """Put the adapter over the model that a folder holds, or a new one, as far as the options say so."""
    if saved is not None:
        put_adapter(model, saved, options.adapter)
    elif options.adapter is not None:
        add_adapter(model, options.adapter, seed=seed)
    if drops(model) and is_recomputing(model):
        raise UserError(
            "model.adapter.dropout with model.gradient_checkpointing: layers that are computed again would drop other"
            " inputs than the first time.  Use one of them; dropout is rarely of use in reinforcement learning."
        )
