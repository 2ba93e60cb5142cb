"""Calls in the trainer's own process: what they do to it is noticed, and what is waited for is told."""

import math
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from posttrain.errors import RunError
from posttrain.rewards.grading.calls import Call

PATIENCE_SECONDS = 60.0
"""How long functions that nothing ends may take before it is said which ones are waited for."""


@contextmanager
def telling_what_is_waited_for(calls: Sequence[Call]) -> Iterator[None]:
    """Warn, once a while has passed, of the functions among the calls that may take for ever."""
    endless = [call.function for call in calls if not call.function.bounded and math.isinf(call.deadline().at)]
    if not endless:
        yield
        return
    names = ", ".join(dict.fromkeys(repr(function.name) for function in endless))
    timer = threading.Timer(PATIENCE_SECONDS, warn_of, args=[names])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn_of(names: str) -> None:
    """Say whose answer is waited for, and what would end it."""
    warnings.warn(
        f"reward {names}: still waiting for it after {PATIENCE_SECONDS:g} s, and it has no deadline.  To have one that"
        " takes too long ended, give it `workers: 1` and `item_seconds` in the recipe, or"
        " reward_function(call, workers=1, item_seconds=...) in Python.",
        RuntimeWarning,
        stacklevel=1,
    )


@contextmanager
def keeping_stdout(names: str) -> Iterator[None]:
    """Refuse functions that close the standard output, which the run goes on printing to."""
    before = is_closed()
    try:
        yield
    finally:
        if is_closed() and not before:
            sys.stdout = sys.stderr  # for what is said until the end
            raise RunError(
                f"reward {names}: closed the standard output, which the run prints to.  Leave it open, or give the"
                " reward `workers: 1` in the recipe, reward_function(call, workers=1) in Python."
            )


@contextmanager
def keeping_torch() -> Iterator[None]:
    """Restore what functions change of torch for the whole thread: whether gradients are kept, the default type."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(dtype)


def is_closed() -> bool:
    """Whether nothing can be printed any more; a program without a standard output prints nothing anyway."""
    return sys.stdout is not None and sys.stdout.closed
