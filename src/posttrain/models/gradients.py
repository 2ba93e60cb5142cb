"""Gradients of large matrices written where they are kept, instead of returned to autograd.

Autograd holds a gradient for every use of a parameter, and another for their sum.  For an output matrix that is also
the embedding, with a vocabulary of 150,000, that is the peak of an update.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_IN_PLACE = ContextVar("in_place", default=False)


@contextmanager
def gradients_in_place() -> Iterator[None]:
    """Have operations of `models/` add to `parameter.grad` in their backward pass, where they can, and return nothing.

    For forward passes that end in `Tensor.backward`, where the sum is the same in whichever order they run;
    `torch.autograd.grad` and hooks of the parameter do not see what is written so.
    """
    token = _IN_PLACE.set(True)
    try:
        yield
    finally:
        _IN_PLACE.reset(token)


@dataclass(frozen=True, slots=True)
class InPlaceGradient:
    """Where the gradient of a parameter goes that autograd is not shown.

    A record, for tensors among a function's arguments would get a place in the graph.
    """

    parameter: Tensor

    def gradient(self) -> Tensor:
        """`parameter.grad`, zeros at first."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return self.parameter.grad


def in_place_gradient(weight: Tensor) -> InPlaceGradient | None:
    """The parameter if its gradient is to be written in place, or None."""
    wanted = _IN_PLACE.get() and torch.is_grad_enabled() and weight.requires_grad
    return InPlaceGradient(weight) if wanted and isinstance(weight, nn.Parameter) else None
