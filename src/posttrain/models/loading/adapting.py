"""Adapters over a model that was loaded: a new one, or one that a folder holds."""

import json
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter
from posttrain.models.adapters.peft_names import named_by_weight, refused_by_peft
from posttrain.models.adapters.placing import add_adapter
from posttrain.models.loading.folder_digest import model_digest
from posttrain.models.loading.folder_kinds import bundled_folder, read_json
from posttrain.options.adapter import ADAPTER_CONFIG, AdapterOptions
from posttrain.options.model import BUNDLED_MODELS, ModelOptions

BASE_MODEL = "base_model.json"
"""The file beside an adapter with the digest of its base's folder, by which a bundled one is known on any machine."""


def base_options(options: ModelOptions, saved: SavedAdapter) -> ModelOptions:
    """How the model below a saved adapter is loaded: by the path that this names, in 4 bits if it was."""
    try:
        below = replace(
            options,
            path=bundled_name(saved) or saved.base,
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


def note_base(base: str, folder: Path) -> None:
    """Say in an adapter's folder, beside the path of its base, what that one holds; nothing of a model on the hub."""
    digest = model_digest(Path(base)) if base else ""
    (folder / BASE_MODEL).unlink(missing_ok=True)
    if digest:
        (folder / BASE_MODEL).write_text(json.dumps({"sha256": digest}) + "\n", encoding="utf-8")


def bundled_name(saved: SavedAdapter) -> str | None:
    """The bundled model that an adapter was trained over, where the path of that one is another machine's."""
    note = saved.folder / BASE_MODEL
    if Path(saved.base).is_dir() or not note.is_file():
        return None
    digest = read_json(note, f"model.path = {saved.folder}").get("sha256")
    return next((name for name in BUNDLED_MODELS if model_digest(bundled_folder(name)) == digest), None)


def put_over(model: PreTrainedModel, options: ModelOptions, saved: SavedAdapter | None, *, seed: int) -> None:
    """Put the adapter over the model that a folder holds, or a new one, as far as the options say so."""
    if saved is not None:
        put_adapter(model, saved, options.adapter)
    elif options.adapter is not None:
        add_adapter(model, options.adapter, seed=seed)


def require_adapter_for_peft(model: PreTrainedModel, options: ModelOptions) -> None:
    """Refuse, before anything is trained, an adapter that peft could not load from RUN/adapter."""
    layers = lora_layers(model)
    if options.adapter is not None and options.adapter.save == "merged":
        return
    remedy = "Or set model.adapter.save: merged, which keeps a whole model."
    unread = [name for name in layers if refused_by_peft(model, name)]
    if unread:
        raise UserError(
            f"model.adapter.targets: peft loads no adapter of {unread[0]} in models of this family"
            f" ({model.config.model_type}).  Leave it out.  {remedy}"
        )
    dropping = [name for name in named_by_weight(model, layers) if layers[name].options.dropout > 0]
    if dropping:
        raise UserError(
            f"model.adapter.dropout = {layers[dropping[0]].options.dropout}: peft has no dropout for {dropping[0]},"
            " which it takes for an expert unless it is named by its weight.  Set dropout to 0, or leave such layers"
            f" out of model.adapter.targets.  {remedy}"
        )
