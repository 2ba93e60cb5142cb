"""Making model objects one at a time.

While transformers makes or loads a model it changes parts of torch for the whole process (initialisers, tied weights),
and a seed is the process's as well: two sessions that open at once in threads would get models without weights.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from posttrain.errors import UserError

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is made or loaded."""


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
    """Tell what transformers raises of a folder that it cannot load in one UserError.

    `message` is made of the first words of what transformers said.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(message(" ".join(str(error).split())[:300])) from error
