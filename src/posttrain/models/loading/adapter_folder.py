"""What an adapter's folder holds next to the adapter: its base, stop tokens and chat template.

An adapter's base does not know the chat template and stop tokens given in training.  They are stored with the adapter:
the tokenizer's files, and generation_config.json with the stop tokens.  peft reads neither.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_format import SavedAdapter
from posttrain.models.adapters.peft_layers import named_by_weight, refused_by_peft
from posttrain.models.loading.folder_kinds import bundled_folder, model_digest, read_json
from posttrain.options.model import ADAPTER_CONFIG, BUNDLED_MODELS, AdapterOptions, ModelOptions

BASE_MODEL = "base_model.json"
"""The file with the digest of the base's folder, which identifies a bundled base on any machine."""
GENERATION_CONFIG = "generation_config.json"


def base_options(options: ModelOptions, saved: SavedAdapter) -> ModelOptions:
    """Options of the model below a saved adapter; a base that is not here may be a bundled one, by its digest."""
    note, path = saved.folder / BASE_MODEL, saved.base
    if not Path(path).is_dir() and note.is_file():
        digest = read_json(note, f"model.path = {saved.folder}").get("sha256")
        path = next((name for name in BUNDLED_MODELS if model_digest(bundled_folder(name)) == digest), path)
    adapter, quantization = options.adapter or AdapterOptions(), options.quantization or saved.quantization
    try:
        below = replace(options, path=path, adapter=adapter, quantization=quantization)
        below.require_folder()
    except UserError as error:
        fault = f"base_model_name_or_path in {saved.folder / ADAPTER_CONFIG}: the adapter's base cannot be loaded"
        raise UserError(f"{fault}.  {error}  If it has moved, write its new folder there.") from error
    return below


def require_adapter_for_peft(model: PreTrainedModel, options: ModelOptions) -> None:
    """Refuse, before anything is trained, an adapter that peft could not load from RUN/adapter."""
    if options.adapter is not None and options.adapter.save == "merged":
        return
    layers = lora_layers(model)
    unread = [name for name in layers if refused_by_peft(model, name)]
    dropping = [name for name in named_by_weight(model, layers) if layers[name].options.dropout > 0]
    if unread:
        fault = f"targets: peft cannot load an adapter of {unread[0]} in this family ({model.config.model_type})"
    elif dropping:
        share = layers[dropping[0]].options.dropout
        fault = f"dropout = {share}: peft has no dropout for {dropping[0]}, which it addresses by its weight"
    else:
        return
    raise UserError(
        f"model.adapter.{fault}.  Remove {'it' if unread else 'the dropout, or the layer,'} from the adapter, or set"
        " model.adapter.save: merged, which saves a whole model."
    )


def adapter_template(adapter: Path) -> str | dict[str, str] | None:
    """The template in the folder of an adapter without a tokenizer, or in its settings; several have names."""
    file, settings = adapter / "chat_template.jinja", adapter / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not settings.is_file():
        return None
    given = read_json(settings, f"model.path = {adapter}").get("chat_template")
    return {each["name"]: each["template"] for each in given} if isinstance(given, list) else given


def named_stop_ids(saved: SavedAdapter | None) -> list[int]:
    if saved is None or not (saved.folder / GENERATION_CONFIG).is_file():
        return []
    named = read_json(saved.folder / GENERATION_CONFIG, f"model.path = {saved.folder}").get("eos_token_id")
    return [named] if isinstance(named, int) else list(named or [])


def name_stop_ids(model: PreTrainedModel, ids: Sequence[int]) -> None:
    if ids:
        config = model.generation_config or GenerationConfig()
        known = config.eos_token_id
        config.eos_token_id = sorted({*ids, *([known] if isinstance(known, int) else known or [])})
        model.generation_config = config


def write_stop_ids(ids: Sequence[int], folder: Path) -> None:
    """Write stop tokens into a folder's generation config, and keep its other settings."""
    file = folder / GENERATION_CONFIG
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    content["eos_token_id"] = list(ids)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def with_chat_template(
    tokenizer: PreTrainedTokenizerBase, file: str, option: str = "model.chat_template"
) -> PreTrainedTokenizerBase:
    """The tokenizer with the template in a file, if one is named; it is saved with the tokenizer."""
    if file:
        try:
            tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fault = f"cannot be read as text in UTF-8 ({error})"
            raise UserError(f"{option} = {file}: {fault}.  Give the file of a Jinja template.") from error
    return tokenizer
