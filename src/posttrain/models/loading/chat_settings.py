"""How a model is spoken to: a chat template of the user's own, and what lies with an adapter.

An adapter's base knows nothing of a template and of stop tokens that were given when it was trained, so they lie in the
adapter's folder: the tokenizer's files, and generation_config.json with the stop tokens.  peft reads neither.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.loading.folder_kinds import has_tokenizer, read_json

GENERATION_CONFIG = "generation_config.json"


def tokenizer_folder(base: Path, adapter: Path | None) -> Path:
    """The folder whose tokenizer is taken: the adapter's, unless it has none."""
    return adapter if adapter is not None and has_tokenizer(adapter) else base


def template_of(adapter: Path) -> str | dict[str, str] | None:
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
