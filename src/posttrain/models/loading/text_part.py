"""The causal language model inside a model that reads pictures or sound too."""

from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import CANNOT_READ
from posttrain.models.adapters.peft_names import Wrapper


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether a config is of a model with a text part among others."""
    return config.get_text_config(decoder=True) is not config


def require_causal_config(config: PreTrainedConfig, where: str) -> None:
    """Refuse a family without a causal language model in transformers; code that comes with a model may have one.

    Of models that read more than text, those for pictures are loaded, as their text part.
    """
    text = config.get_text_config(decoder=True)
    fault = ""
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING and (is_wrapper(config) or not hasattr(config, "auto_map")):
        fault = f"transformers has no causal language model for {text.model_type}"
    elif is_wrapper(config) and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        fault = "it reads more than text, but not pictures"
    if fault:
        kind = next(iter(config.architectures or ()), type(config).__name__.removesuffix("Config"))
        raise UserError(f"{where}: {kind} cannot be loaded: {fault}.  Use a text-only model.")


def text_part(whole: PreTrainedModel) -> PreTrainedModel:
    """The decoder and the output layer of a wrapper as a causal language model that shares the wrapper's weights."""
    text = whole.config.get_text_config(decoder=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(text)
    decoder = whole.get_decoder()
    if type(decoder) is type(model):  # as in Llama 4, whose decoder has the output layer
        model = decoder
    else:
        setattr(model, model.base_model_prefix, decoder)
        model.set_output_embeddings(whole.get_output_embeddings())
        text.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.name_or_path = whole.name_or_path
    if whole.generation_config is not None:
        model.generation_config = whole.generation_config
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if missing:
        raise UserError(f"model: the text part of {type(whole).__name__} lacks {missing[0]}.  Use a text-only model.")
    cast(Any, model).taken_from = Wrapper(
        model_type=whole.config.model_type,
        inside="" if model is decoder else model.base_model_prefix,
        outside=next(name for name, module in whole.named_modules() if module is decoder),
        gap=gap_to_wrapper(whole, model),
    )
    return model


@torch.no_grad()
def gap_to_wrapper(whole: PreTrainedModel, text: PreTrainedModel) -> float:
    """Largest difference of the text model's log-probs from the wrapper's, in nats; 0 if that cannot read only text.

    Cohere2's text model multiplies logits by `logit_scale`, and Aya Vision's wrapper does not (transformers 5.23).
    """
    rows = torch.tensor([[1, 2, 3]], device=whole.device) % len(cast(nn.Embedding, whole.get_input_embeddings()).weight)
    whole.eval()
    text.eval()
    try:
        theirs, ours = (model(input_ids=rows, use_cache=False).logits.float() for model in (whole, text))
    except CANNOT_READ:
        return 0.0
    return float((theirs.log_softmax(-1) - ours.log_softmax(-1)).abs().max())
