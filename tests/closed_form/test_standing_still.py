"""The share of weights that a step of the learning rate's size leaves where they are, by the spacing of their type."""

import pytest
import torch
from torch import Tensor, nn

from posttrain.training.optimizer import standing_still


def share(weight: Tensor, rate: float, *, frozen: Tensor | None = None) -> float:
    parts = [nn.Parameter(weight)]
    if frozen is not None:
        parts.append(nn.Parameter(frozen, requires_grad=False))
    return standing_still(parts, rate)


def test_one_in_bfloat16_moves_by_half_the_spacing_below_it() -> None:
    # Below 1 numbers of 8 bits lie 2^-8 apart, so that 1 - rate is rounded to 1 for a rate below 2^-9.
    # The rule asks for a whole spacing, eps · 2^(e-2) with e = 1 and eps = 2^-7: 2^-8, and a step of just that moves.
    one = torch.ones(1, dtype=torch.bfloat16)
    assert share(one, 2.0**-8) == 0
    assert share(one, 2.0**-8 * 0.999) == 1


def test_the_share_is_of_the_trained_weights() -> None:
    # Of 1, 2, 4 and 0 a step of 2^-8 moves 1; from 2 on the spacing is twice as wide, and 0 always moves.
    weights = torch.tensor([1.0, 2.0, 4.0, 0.0], dtype=torch.bfloat16)
    frozen = torch.full((12,), 4.0, dtype=torch.bfloat16)
    assert share(weights, 2.0**-8, frozen=frozen) == 2 / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_as_wide_as_float32_counts_as_moved(dtype: torch.dtype) -> None:
    assert share(torch.ones(3, dtype=dtype), 1e-30) == 0


def test_without_trained_weights_none_stands_still() -> None:
    assert standing_still([], 1e-3) == 0
