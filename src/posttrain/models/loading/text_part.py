"""The causal language model inside a model that reads pictures or sound too."""

from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import CANNOT_READ
from posttrain.models.adapters.peft_names import Wrapper, note_wrapper


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a model with a text part among others."""
    return config.get_text_config(decoder=True) is not config


def require_text_part(config: PreTrainedConfig, where: str) -> None:
    """Refuse a model whose text part transformers has no causal language model for."""
    text = config.get_text_config(decoder=True)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{where}: {made_as(config)} reads more than text, and transformers has no causal language model for its"
            f" text part ({text.model_type}).  Take a model of text alone."
        )
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UserError(
            f"{where}: {made_as(config)} reads more than text; of such models those that read pictures are loaded, as"
            f" their text part.  Take a {text.model_type} of its own."
        )


def require_causal_class(config: PreTrainedConfig, where: str) -> None:
    """Refuse a family that transformers has no causal language model for; one whose code comes with it may have."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise UserError(
            f"{where}: transformers has no causal language model of the family {config.model_type} ({made_as(config)})."
        )


def made_as(config: PreTrainedConfig) -> str:
    """The class that a model was saved as."""
    return next(iter(config.architectures or ()), type(config).__name__.removesuffix("Config"))


def text_part(whole: PreTrainedModel) -> PreTrainedModel:
    """The decoder and the output layer of a wrapper as a causal language model, the weights being the wrapper's own."""
    text = whole.config.get_text_config(decoder=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(text)
    decoder = whole.get_decoder()
    if type(decoder) is type(model):  # as in Llama 4, whose output layer is the decoder's own
        model = decoder
    else:
        setattr(model, model.base_model_prefix, decoder)
        model.set_output_embeddings(whole.get_output_embeddings())
        text.tie_word_embeddings = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.name_or_path = whole.name_or_path
    if whole.generation_config is not None:
        model.generation_config = whole.generation_config
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise UserError(
            f"model: the text part of a {type(whole).__name__} lacks {left[0]}.  Take a model of text alone."
        )
    note_wrapper(model, wrapper_around(decoder, "" if model is decoder else model.base_model_prefix, whole, model))
    return model


def wrapper_around(decoder: nn.Module, inside: str, whole: PreTrainedModel, text: PreTrainedModel) -> Wrapper:
    """Where a decoder lies in the text model and in the wrapper."""
    outside = next(name for name, module in whole.named_modules() if module is decoder)
    return Wrapper(model_type=whole.config.model_type, inside=inside, outside=outside, gap=gap_to_wrapper(whole, text))


@torch.no_grad()
def gap_to_wrapper(whole: PreTrainedModel, text: PreTrainedModel) -> float:
    """How far the text model is from the wrapper on text; 0 where that cannot read text alone.

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
