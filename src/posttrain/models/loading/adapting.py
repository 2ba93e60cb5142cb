"""Adapters over a model that was loaded: a new one, or one that a folder holds."""

import json
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter
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
