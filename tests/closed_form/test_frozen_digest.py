"""What a checkpoint says of the weights that it leaves out: one digest of names, types, shapes and numbers."""

import hashlib

import numpy as np
import pytest
from torch import nn

from posttrain.errors import RunError
from posttrain.runs.tensor_state import frozen_digest, frozen_state, require_same_frozen
from tests.support.refusals import refused


def half_frozen() -> nn.Module:
    """Eight layers, of which the last alone learns."""
    module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(8)))
    for number, layer in enumerate(module):
        layer.weight.data.fill_(number / 4)
        layer.weight.requires_grad_(number == 7)
    return module


def test_the_digest_is_of_every_frozen_tensor_in_the_order_of_names() -> None:
    expected = hashlib.sha256()
    for number in range(7):
        expected.update(f"{number}.weight torch.float32 [2, 2]\n".encode())
        expected.update(np.full((2, 2), number / 4, dtype=np.float32).tobytes())
    assert frozen_digest(half_frozen()) == expected.hexdigest()


def test_two_bases_are_told_by_name_and_digest_and_one_without_frozen_parts_by_that() -> None:
    first, second = half_frozen(), half_frozen()
    second[0].weight.data.add_(1)
    states = {name: frozen_state(module, name) for name, module in (("first", first), ("second", second))}
    short = {name: frozen_digest(module)[:16] for name, module in (("first", first), ("second", second))}
    require_same_frozen(states["first"], states["first"])
    said = f"over first .SHA-256 {short['first']}., and this is second .SHA-256 {short['second']}.\\."
    with pytest.raises(RunError, match=said):
        require_same_frozen(states["second"], states["first"])
    with refused("and this is a model without frozen parts.", error=RunError):
        require_same_frozen(frozen_state(nn.Linear(1, 1), "whole"), states["first"])
