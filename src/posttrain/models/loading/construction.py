"""Making model objects one at a time.

While transformers makes or loads a model it changes parts of torch for the whole process (initialisers, tied weights),
and a seed is the process's as well: two sessions that open at once in threads would get models without weights.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]  # of a pickle it refuses
from transformers.utils import logging as transformers_logging

from posttrain.errors import UserError

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is made or loaded."""

LOAD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError),
    *(SafetensorError, StrictDataclassError, TypeError, UnpicklingError, ValueError),
)
"""What transformers and the parsers below it raise of a folder that is damaged or hostile."""
PLAIN_WORDS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
"""Those whose text says what is wrong without the name of its class."""


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Load or save a model one at a time, without transformers' progress bars, which would write over ours."""
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
    """Raise what transformers raises of a folder that it cannot load as one UserError.

    `message` is made of the first words of what transformers said.
    """
    try:
        yield
    except LOAD_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(message(first_words(error))) from error


def lacking_weights(found: Mapping[str, Any]) -> list[str]:
    """The weights that transformers' loading info says would be made up: those missing, and those of another shape."""
    return sorted([*map(str, found["missing_keys"]), *(str(each[0]) for each in found["mismatched_keys"])])


def first_words(error: Exception) -> str:
    """What an error says, in a line; of a pickle without torch's advice to unpickle it all the same."""
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle that holds more than tensors, which could run code and is never unpickled"
    if isinstance(error, RecursionError):
        return "one of its files is nested too deeply"
    said = " ".join(str(error).split())[:300]
    return said if said and isinstance(error, PLAIN_WORDS) else f"{type(error).__name__}: {said}"
