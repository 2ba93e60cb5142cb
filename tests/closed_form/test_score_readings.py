"""When a quicker way to score counts as the same: by the share of 1 and the score's size that numbers are apart."""

import pytest
import torch

from posttrain.models.classifiers.last_token_scores import EXACT, ROUNDED, agrees
from tests.support.reward_models import classifier

ALONE = torch.tensor([[9.0], [0.0], [-3.0]], dtype=torch.float64)
SIZES = torch.tensor([[10.0], [1.0], [4.0]], dtype=torch.float64)
"""1 + |score|"""


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, EXACT), (torch.bfloat16, ROUNDED)], ids=str)
def test_a_score_may_be_apart_by_rounding_in_proportion_to_its_size(row: int, dtype: torch.dtype, bound: float) -> None:
    model = classifier().to(dtype)
    for share, same in ((0.9, True), (-0.9, True), (1.1, False), (-1.1, False)):
        apart = torch.zeros_like(ALONE)
        apart[row] = share * bound * SIZES[row]
        assert agrees(ALONE + apart, ALONE, model) is same
