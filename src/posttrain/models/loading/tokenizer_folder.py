"""What prompts need of a model: its tokenizer and its stop tokens, without the weights."""

from transformers import GenerationConfig, PreTrainedTokenizerBase

from posttrain.models.adapters.peft_format import read_adapter
from posttrain.models.loading.adapting import base_options
from posttrain.models.loading.chat_settings import named_stop_ids
from posttrain.models.loading.model_folder import load_errors, loaded_config, loaded_tokenizer, located_folder
from posttrain.models.policy import single_token, united_stop_ids
from posttrain.options.adapter import is_adapter_folder
from posttrain.options.model import ModelOptions


def load_tokenizer(options: ModelOptions) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The tokenizer that a policy of these options has, and its stop tokens.  Raises UserError where there is none."""
    adapter = None
    if not options.is_bundled and is_adapter_folder(options.folder):
        adapter = options.folder
        options = base_options(options, read_adapter(adapter))
    folder = located_folder(options)
    config, tokenizer = loaded_config(folder, options), loaded_tokenizer(folder, options, adapter)
    with load_errors(options):
        stored = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if stored else GenerationConfig.from_model_config(config)
    own = (generation.eos_token_id, getattr(config, "eos_token_id", None), tokenizer.eos_token_id)
    texts = [single_token(tokenizer, text) for text in options.stop_tokens]
    of_adapter = [] if adapter is None else named_stop_ids(adapter)
    return tokenizer, united_stop_ids((*own, texts, of_adapter), options.path)
