"""Adapters over a model that was loaded: a new one, or one that a folder holds."""

from dataclasses import replace

from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter
from posttrain.models.adapters.placing import add_adapter
from posttrain.options.adapter import ADAPTER_CONFIG, AdapterOptions
from posttrain.options.model import ModelOptions


def base_options(options: ModelOptions, saved: SavedAdapter) -> ModelOptions:
    """How the model below a saved adapter is loaded: by the path that this names, in 4 bits if it was."""
    try:
        below = replace(
            options,
            path=saved.base,
            adapter=options.adapter or AdapterOptions(),
            quantization=options.quantization or saved.quantization,
        )
        below.require_folder()
    except UserError as error:
        where = f"base_model_name_or_path in {saved.folder / ADAPTER_CONFIG}"
        raise UserError(
            f"{where}: the model below the adapter cannot be had.  {error}  If that model has moved, write its new"
            " folder there."
        ) from error
    return below


def put_over(model: PreTrainedModel, options: ModelOptions, saved: SavedAdapter | None, *, seed: int) -> None:
    """Put the adapter over the model that a folder holds, or a new one, as far as the options say so."""
    if saved is not None:
        put_adapter(model, saved, options.adapter)
    elif options.adapter is not None:
        add_adapter(model, options.adapter, seed=seed)
