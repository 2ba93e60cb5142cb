"""What prompts need of a model folder: its tokenizer and its stop tokens, without the weights."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.loading.chat_template import with_chat_template
from posttrain.models.loading.model_folder import bundled_folder
from posttrain.models.policy import united_stop_ids
from posttrain.options.model import BUNDLED, ModelOptions


def load_tokenizer(options: ModelOptions) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The tokenizer that a policy of these options has, and its stop tokens.  Raises UserError where there is none."""
    options.require_files()
    folder = bundled_folder() if options.path == BUNDLED else Path(options.path)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stored = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if stored else GenerationConfig.from_model_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path = {options.path}: transformers cannot load its tokenizer ({error}).  The folder needs"
            " config.json, tokenizer.json and tokenizer_config.json."
        ) from error
    named = (generation.eos_token_id, getattr(config, "eos_token_id", None), tokenizer.eos_token_id)
    return with_chat_template(tokenizer, options.chat_template), united_stop_ids(named, options.path)
