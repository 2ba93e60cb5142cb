"""Making model objects one at a time, and which parameters are trained and in which types the others are held.

While transformers makes or loads a model it changes parts of torch for the whole process (initialisers, tied weights,
the seed): two sessions that open at once in threads would get models without weights.  `text_part` is the causal
language model inside a model that reads pictures or sound too.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # of a pickle it refuses
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import CANNOT_READ, expert_matrices
from posttrain.models.adapters.peft_layers import Wrapper

ONE_AT_A_TIME = threading.RLock()

LOAD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError),
    *(SafetensorError, StrictDataclassError, TypeError, UnpicklingError, ValueError),
)
"""What transformers and its parsers raise for a damaged or hostile folder."""
PLAIN_WORDS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
"""Errors whose text is clear without the class's name."""


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Load or save one model at a time, without transformers' progress bars, which would overwrite ours."""
    with ONE_AT_A_TIME:
        shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                transformers_logging.enable_progress_bar()


@contextmanager
def transformers_load_errors(message: Callable[[str], str]) -> Iterator[None]:
    """Raise transformers' errors about a folder as one UserError; `message` gets the first words of what it said."""
    try:
        yield
    except LOAD_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(message(first_words(error))) from error


def loaded(loader: Any, folder: Path | None, **given: object) -> tuple[PreTrainedModel, list[str], Mapping[str, Any]]:
    """A model as transformers loads it, the weights that it makes up (missing or misshapen), and what it found."""
    with without_progress_bars():
        model, found = loader.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **given)
    lacking = [*map(str, found["missing_keys"]), *(str(each[0]) for each in found["mismatched_keys"])]
    return model, sorted(lacking), found


def require_no_lack(model: PreTrainedModel, lacking: Sequence[str], where: str) -> None:
    if lacking:
        some = ", ".join(lacking[:3]) + (" ..." if len(lacking) > 3 else "")
        fault = f"{len(lacking)} weights of a {type(model).__name__} are missing ({some}) and would be random"
        raise UserError(f"{where}: {fault}.  Copy all files of the model again.")


def first_words(error: Exception) -> str:
    """An error's text in one line, without torch's advice to unpickle anyway."""
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that holds more than tensors, which could run code and is never unpickled"
    if isinstance(error, RecursionError):
        return "one of its files is nested too deeply"
    said = " ".join(str(error).split())[:300]
    return said if said and isinstance(error, PLAIN_WORDS) else f"{type(error).__name__}: {said}"


MATRICES = (nn.Linear, Conv1D)
"""Layers whose matrix is cast to the type of products."""


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match; any name of a tied parameter will do."""
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not found:
            some = ", ".join(name for name, _ in (*named[:2], *named[-2:]))
            fault = f"no parameter is named {pattern}"
            raise UserError(f"model.frozen: {fault}.  Use names such as {some}, or patterns with *.")
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise UserError(f"model.frozen = {', '.join(patterns)} leaves no parameter to train.  Freeze fewer of them.")


def hold_frozen_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold the frozen matrices of linear layers and experts in the smaller type that products round them to anyway.

    So the numbers stay the same.  Norms, biases and embeddings stay: their output takes on their type.
    """
    for matrix in linear_matrices(model):
        if not matrix.requires_grad:
            matrix.data = matrix.data.to(dtype)


def linear_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices of linear layers and of experts, each once, without embeddings and those in 4 bits."""
    others = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, MATRICES)
        for parameter in module.parameters(recurse=False)
    }
    found = {id(module.weight): module.weight for module in model.modules() if isinstance(module, MATRICES)}
    linear = [each for key, each in found.items() if key not in others and each.is_floating_point()]
    return [*linear, *expert_matrices(model).values()]


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Whether a config is of a model with a text part among others."""
    return config.get_text_config(decoder=True) is not config


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that loads a causal language model, or a model with one as its text part."""
    return AutoModelForImageTextToText if is_wrapper(config) else AutoModelForCausalLM


def require_causal_config(config: PreTrainedConfig, where: str) -> None:
    """Refuse a family without a causal language model in transformers; code that comes with a model may have one.

    Models for pictures and text are loaded as their text part; other multimodal models are not.
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
