"""The shape of the model that a recipe names, from its config.json alone."""

from dataclasses import replace
from pathlib import Path

from posttrain.models.adapters.peft_format import read_adapter
from posttrain.models.loading.adapting import base_options
from posttrain.models.loading.folder_kinds import bundled_folder, quantisation, read_json
from posttrain.models.loading.hub import hub_folder
from posttrain.models.loading.model_folder import loaded_config, where
from posttrain.models.loading.new_model import new_model_config, new_tokenizer
from posttrain.models.loading.text_part import is_wrapper
from posttrain.models.memory.model_shape import ModelShape, config_shape
from posttrain.options.adapter import is_adapter_folder
from posttrain.options.model import ModelOptions
from posttrain.options.new_model import NewModelOptions


def recipe_shape(options: ModelOptions | NewModelOptions) -> ModelShape:
    """The shape of a model folder, which needs no weights, of the bundled model, or of one to be made from nothing.

    Of an adapter's folder it is that of the model below.  A model of the hub is found as a run finds it.
    """
    if isinstance(options, NewModelOptions):
        return config_shape(new_model_config(options, new_tokenizer(options.template)))
    if not options.is_bundled and is_adapter_folder(options.folder):
        options = base_options(options, read_adapter(options.folder))
    folder = config_folder(options)
    config = loaded_config(folder, options)
    shape = config_shape(config.get_text_config() if is_wrapper(config) else config)
    return replace(shape, quantised=quantisation(read_json(folder / "config.json", where(options))))


def config_folder(options: ModelOptions) -> Path:
    """The folder whose config.json describes the model; that it has weights as well is not asked."""
    options.require_folder()
    if options.is_bundled:
        return bundled_folder(options.path)
    if options.hub_name is not None:
        return hub_folder(options.hub_name, options.hub_revision, with_code=options.trust_remote_code)
    return options.folder
