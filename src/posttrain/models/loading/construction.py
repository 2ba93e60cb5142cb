"""Making model objects one at a time, and which parameters are trained and in which types the others are held.

While transformers makes or loads a model it changes parts of torch for the whole process (initialisers, tied weights,
the seed): two sessions that open at once in threads would get models without weights.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # of a pickle it refuses
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import expert_matrices

ONE_AT_A_TIME = threading.RLock()

LOAD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError),
    *(SafetensorError, StrictDataclassError, TypeError, UnpicklingError, ValueError),
)
"""What transformers and its parsers raise for a damaged or hostile folder."""
PLAIN_WORDS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
"""Those whose text is clear without the class's name."""


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


def lacking_weights(found: Mapping[str, Any]) -> list[str]:
    """The weights that transformers would make up, by its loading info: missing ones, and those of another shape."""
    return sorted([*map(str, found["missing_keys"]), *(str(each[0]) for each in found["mismatched_keys"])])


def require_no_lack(model: PreTrainedModel, lacking: Sequence[str], where: str) -> None:
    """Refuse a folder that lacks weights."""
    if lacking:
        raise UserError(
            f"{where}: {len(lacking)} weights of a {type(model).__name__} are missing ({', '.join(lacking[:3])}"
            f"{' ...' if len(lacking) > 3 else ''}) and would be random.  Copy all files of the model again."
        )


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
            raise UserError(
                f"model.frozen: no parameter is named {pattern}.  Use names such as {some}, or patterns with *."
            )
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


def hold_rest_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold all other parameters than `linear_matrices` in this type."""
    matrices = {id(each) for each in linear_matrices(model)}
    for parameter in model.parameters():
        if id(parameter) not in matrices and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


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
