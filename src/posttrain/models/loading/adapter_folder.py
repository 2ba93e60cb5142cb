"""Adapters over a loaded model, new or from a folder, and what else an adapter's folder holds.

An adapter's base does not know the chat template and stop tokens given in training.  They are stored with the adapter:
the tokenizer's files, and generation_config.json with the stop tokens.  peft reads neither.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import add_adapter
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter
from posttrain.models.adapters.peft_names import named_by_weight, refused_by_peft
from posttrain.models.loading.folder_kinds import bundled_folder, has_tokenizer, model_digest, read_json
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


GENERATION_CONFIG = "generation_config.json"


def tokenizer_folder(base: Path, adapter: Path | None) -> Path:
    """The folder whose tokenizer is taken: the adapter's, unless it has none."""
    return adapter if adapter is not None and has_tokenizer(adapter) else base


def adapter_template(adapter: Path) -> str | dict[str, str] | None:
    """The template that lies with an adapter which has no tokenizer of its own; several have names; None where none is.

    It is a file of its own, or stands in the settings of a tokenizer whose other files are the base's.
    """
    file, settings = adapter / "chat_template.jinja", adapter / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not settings.is_file():
        return None
    given = read_json(settings, f"model.path = {adapter}").get("chat_template")
    return {each["name"]: each["template"] for each in given} if isinstance(given, list) else given


def named_stop_ids(adapter: Path) -> list[int]:
    """The stop tokens that the folder of an adapter names; none where it names none."""
    if not (adapter / GENERATION_CONFIG).is_file():
        return []
    named = read_json(adapter / GENERATION_CONFIG, f"model.path = {adapter}").get("eos_token_id")
    return [named] if isinstance(named, int) else list(named or [])


def name_stop_ids(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Have a model's generation config name these stop tokens, if there are any, beside its own."""
    if not ids:
        return
    config = model.generation_config or GenerationConfig()
    own = config.eos_token_id
    config.eos_token_id = sorted({*ids, *([own] if isinstance(own, int) else own or [])})
    model.generation_config = config


def write_stop_ids(ids: Sequence[int], folder: Path) -> None:
    """Name stop tokens in a folder's generation config, whatever else it says."""
    file = folder / GENERATION_CONFIG
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    content["eos_token_id"] = list(ids)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def with_chat_template(
    tokenizer: PreTrainedTokenizerBase, file: str, option: str = "model.chat_template"
) -> PreTrainedTokenizerBase:
    """The tokenizer with the template in a file, which is then saved with it; as it is where no file is named."""
    if file:
        try:
            tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{option} = {file}: cannot be read as text in UTF-8 ({error}).  Give the file of a Jinja template."
            ) from error
    return tokenizer
