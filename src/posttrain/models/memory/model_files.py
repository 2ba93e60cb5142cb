"""The shape of the model that a recipe names, from its config.json alone."""

from pathlib import Path

from transformers import AutoConfig

from posttrain.errors import UserError
from posttrain.models.loading.model_folder import bundled_folder
from posttrain.models.loading.new_model import new_model_config, new_tokenizer
from posttrain.models.memory.model_shape import ModelShape, config_shape
from posttrain.options.model import BUNDLED, ModelOptions
from posttrain.options.new_model import NewModelOptions


def recipe_shape(options: ModelOptions | NewModelOptions) -> ModelShape:
    """The shape of a model folder, which needs no weights, of the bundled model, or of one to be made from nothing."""
    if isinstance(options, NewModelOptions):
        return config_shape(new_model_config(options, new_tokenizer()))
    options.require_folder()
    folder = bundled_folder() if options.path == BUNDLED else Path(options.path)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path = {options.path}: its config.json cannot be read ({error}).") from error
    return config_shape(config)
