"""How a value head begins: the same expected everywhere, channels that are drawn, or a reward model's score."""

import math

import pytest
import torch

from posttrain.models.classifiers.heads import ValueHead

HIDDEN = 16


def some_states() -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(kind: str, seed: int = 0) -> ValueHead:
    return ValueHead(HIDDEN, kind, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_new_head_expects_the_mean_whatever_it_is_shown(kind: str) -> None:
    head = made(kind)
    assert head(some_states()).tolist() == [0.0] * 5
    head.expect(0.75)
    assert head(some_states()).tolist() == [0.75] * 5


def test_channels_are_drawn_uniformly_around_zero_by_the_seed() -> None:
    """Of 4 d² = 1024 draws within ±1/√d = ±1/4: mean 0 within 4 standard errors, deviation 1/(4√3)."""
    widening = made("mlp").widening
    assert widening is not None
    drawn = widening.weight.detach().flatten()
    spread = 0.25 / math.sqrt(3)
    assert 0.24 < drawn.abs().max() <= 0.25
    assert abs(drawn.mean()) < 4 * spread / 32
    assert drawn.std().item() == pytest.approx(spread, rel=0.05)
    assert widening.bias.tolist() == [0.0] * 4 * HIDDEN
    again, other = (made("mlp", seed=seed).widening for seed in (0, 1))
    assert again is not None
    assert other is not None
    assert torch.equal(again.weight, widening.weight)
    assert not torch.equal(other.weight, widening.weight)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_loaded_score_is_the_whole_value_whatever_was_expected_before(kind: str) -> None:
    head, states, w = made(kind), some_states(), some_states()[0]
    head.expect(3.0)
    head.load_score(w)
    assert head(states).tolist() == pytest.approx((states @ w).tolist(), rel=1e-12)
