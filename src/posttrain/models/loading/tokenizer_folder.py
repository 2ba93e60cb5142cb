"""What is loaded for a policy or next to it: the tokenizer without the weights, and a second model."""

from transformers import GenerationConfig, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.peft_format import read_adapter
from posttrain.models.loading.adapter_folder import base_options, named_stop_ids
from posttrain.models.loading.model_folder import (
    load_errors,
    load_policy,
    load_policy_to_train,
    loaded_config,
    loaded_tokenizer,
    located_folder,
)
from posttrain.models.policy import Policy, single_token, united_stop_ids
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


def load_beside(policy: Policy, path: str, *, option: str, inference: bool = True) -> Policy:
    """The model that an option such as `reference.path` names, on the device that the policy is on.

    Without `inference` it is trained, and saved whole.
    Raises UserError, of that option, where it is none that can be loaded.
    """
    options = ModelOptions(path=path, device="cuda" if policy.device.type == "cuda" else "cpu")
    try:
        if inference:
            return load_policy(options, inference=True)
        return load_policy_to_train(options, saves_whole=True, may_adapt=False)
    except UserError as error:  # which speaks of the section `model`
        if "model.path = " not in str(error):
            raise
        raise UserError(str(error).replace("model.path = ", f"{option} = ")) from error
