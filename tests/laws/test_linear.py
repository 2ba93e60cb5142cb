"""A matrix packed in another order gives the same products."""

import pytest
import torch
import torch.nn.functional as F

from posttrain.models.shared_prompt.linear import MOST_ROWS, PackedWeight, for_inference, linear

WEIGHT = torch.randn(37, 19, generator=torch.Generator().manual_seed(0))

needs_packing = pytest.mark.skipif(not PackedWeight.serves(WEIGHT), reason="this build of torch has no oneDNN products")


@needs_packing
@pytest.mark.parametrize("rows", [1, 3, 32, 100, MOST_ROWS, MOST_ROWS + 1, 2 * MOST_ROWS + 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products_are_products(rows: int, with_bias: bool) -> None:
    random = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, 19, generator=random), torch.randn(37, generator=random) if with_bias else None
    actual, exact = linear(x, for_inference(WEIGHT), bias), F.linear(x.double(), WEIGHT.double(), None)
    expected = exact if bias is None else exact + bias
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5)


@needs_packing
def test_a_packed_matrix_is_a_copy_that_does_not_follow_its_weight() -> None:
    weight = WEIGHT.clone()
    kept = for_inference(weight)
    weight.zero_()
    assert bool(linear(torch.ones(1, 19), kept).abs().sum() > 1)


def test_a_matrix_in_another_precision_stays_as_it_is() -> None:
    for weight in (WEIGHT.double(), WEIGHT.bfloat16()):
        assert for_inference(weight) is weight
