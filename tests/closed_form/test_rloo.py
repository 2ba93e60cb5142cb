"""RLOO's options: a clipped ratio of the whole completion, and what truncated completions earn."""

import pytest
import torch

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import build_algorithm
from tests.support.tiny import gradient


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_rloo_can_clip_the_whole_importance_weight() -> None:
    # Product 1.5, as above; without clip_high the bounds are 1 - clip_low and 1 + clip_low.
    config = {"name": "rloo", "token_weights": "mean_over_sequences", "clip_low": 0.6}
    assert gradient(config, [3, 0.5], [1, 1]) == pytest.approx([-3, -3], rel=1e-12)
    assert gradient(config | {"clip_low": 0.4}, [3, 0.5], [1, 1]) == [0, 0]
    assert gradient(config | {"clip_low": 0.4, "clip_high": 0.6}, [3, 0.5], [1, 1]) == pytest.approx([-3, -3])
    assert gradient(config | {"clip_high": 0.1}, [0.3, 1], [-1, -1]) == [0, 0]
    assert gradient(config | {"clip_high": 0.1}, [0.5, 1], [-1, -1]) == pytest.approx([1, 1], rel=1e-12)


def test_a_truncated_completion_of_rloo_earns_no_token_rewards() -> None:
    # Rewards 1 and 1, penalties of .5 for a cut completion and .25 for a whole one: 1 against .75, or .5 against .75.
    evidence = Evidence(
        rewards=torch.ones(1, 2, dtype=torch.float64),
        scores=torch.ones(1, 1, 2, dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        lengths=torch.ones(1, 2, dtype=torch.long),
        max_completion_tokens=16,
        truncated=torch.tensor([[True, False]]),
        token_rewards=values(-0.5, -0.25),
    )
    for mask, expected in ((True, 0.25), (False, -0.25)):
        algorithm = build_algorithm({"name": "rloo", "mask_truncated": mask})
        assert algorithm.masks_truncated == mask
        assert algorithm.credit(evidence).advantages.tolist() == [expected, -expected]
