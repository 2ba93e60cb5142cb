"""What holds for losses whatever the tokens are: gradients, order, and how clipping and gradients belong together."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.algorithms.kl import ESTIMATORS, of_completions
from posttrain.algorithms.losses import (
    ClipRange,
    clipped_surrogate,
    clipped_tokens,
    log_ratio,
    weighted_policy_gradient,
)
from posttrain.models.logprobs import distribution_kl

CLIP = ClipRange(low=0.2, high=0.28)
LEVELS = ["token", "sequence_mean", "sequence_product"]
LOSSES = [clipped_surrogate, weighted_policy_gradient]
each_level = pytest.mark.parametrize("level", LEVELS)
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
STEP = 1e-5


@st.composite
def tokens(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """log π, log μ, advantages (one per rollout) and rollouts of a few completions, one after the other."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rollout = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    count = len(rollout)
    behaviour = -3 * torch.rand(count, generator=rng, dtype=torch.float64) - 0.1
    logprobs = behaviour + 0.3 * torch.randn(count, generator=rng, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=rng, dtype=torch.float64)[rollout]
    return logprobs, behaviour, advantages, rollout


def slopes(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Central finite differences of a scalar function, one coordinate at a time."""
    result = torch.zeros_like(at)
    for i in range(at.numel()):
        nudge = torch.zeros_like(at).view(-1)
        nudge[i] = STEP
        nudge = nudge.view_as(at)
        result.view(-1)[i] = (function(at + nudge) - function(at - nudge)) / (2 * STEP)
    return result


def autograd(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


def assert_gradient(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> None:
    exact, numeric = autograd(function, at), slopes(function, at)
    assert (exact - numeric).norm() <= 1e-6 * exact.norm() + 1e-9


@each_level
@settings(max_examples=25)
@given(tokens=tokens(), seed=st.integers(0, 1000))
def test_the_gradient_of_the_surrogate_is_its_finite_difference(level, tokens, seed) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    ratio = log_ratio(logprobs, behaviour, rollout, level=level)
    kinks = torch.tensor([CLIP.log_lowest, CLIP.log_highest], dtype=torch.float64)
    assume((ratio[:, None] - kinks).abs().min() > 10 * STEP)  # on a kink there is no derivative to compare with
    weights = torch.rand(len(rollout), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert_gradient(
        lambda x: (weights * clipped_surrogate(x, behaviour, advantages, rollout, clip=CLIP, level=level)).sum(),
        logprobs,
    )


@each_level
@settings(max_examples=25)
@given(tokens=tokens())
def test_the_gradient_of_the_weighted_loss_leaves_the_weight_alone(level, tokens) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    ratio = log_ratio(logprobs, behaviour, rollout, level=level).exp()
    frozen = ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
    numeric = slopes(lambda x: -(frozen * advantages * x).sum(), logprobs)
    exact = autograd(
        lambda x: weighted_policy_gradient(x, behaviour, advantages, rollout, clip=CLIP, level=level).sum(), logprobs
    )
    assert (exact - numeric).norm() <= 1e-6 * exact.norm() + 1e-9


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(tokens=tokens())
def test_the_gradient_of_a_kl_estimate_is_its_finite_difference(name, tokens) -> None:
    assert_gradient(lambda x: ESTIMATORS[name](x, tokens[1]).sum(), tokens[0])


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(tokens=tokens())
def test_the_gradient_of_a_completions_kl_estimate_is_its_finite_difference(name, tokens) -> None:
    logprobs, reference, _, rollout = tokens
    weights = 1 / rollout.bincount()[rollout]
    assert_gradient(lambda x: (weights * of_completions(x, reference, rollout, estimator=name)).sum(), logprobs)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_the_gradient_of_the_full_divergence_is_its_finite_difference(seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, 3, 5, generator=rng, dtype=torch.float64)
    assert_gradient(lambda x: distribution_kl(x, reference).sum(), logits)


@each_loss
@each_level
@given(tokens=tokens(), seed=st.integers(0, 1000))
def test_the_order_of_tokens_and_the_numbering_of_rollouts_do_not_matter(loss, level, tokens, seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(tokens[3]), generator=rng)
    names = torch.randperm(int(tokens[3].max()) + 4, generator=rng)
    shuffled = [column[order] for column in tokens]
    shuffled[3] = names[shuffled[3]]
    expected = loss(*tokens, clip=CLIP, level=level)[order]
    torch.testing.assert_close(loss(*shuffled, clip=CLIP, level=level), expected, rtol=1e-12, atol=1e-12)


@each_loss
@each_level
@given(tokens=tokens())
def test_on_policy_every_loss_has_the_policy_gradient(loss, level, tokens) -> None:
    # At π = μ each has gradient -A for its token: ρ = 1, and a rollout's tokens share their sequence ratio's slope.
    # The product's slope is 1 for every token of the rollout, so |y| losses make |y| times as much of it.
    logprobs, _, advantages, rollout = tokens
    lengths = rollout.bincount()[rollout]
    shares = lengths if loss is clipped_surrogate and level == "sequence_product" else 1
    gradient = autograd(lambda x: loss(x, logprobs, advantages, rollout, clip=CLIP, level=level).sum(), logprobs)
    torch.testing.assert_close(gradient, -advantages * shares, rtol=1e-12, atol=1e-12)


@given(tokens=tokens())
def test_clipped_tokens_are_exactly_those_without_a_gradient(tokens) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    gradient = autograd(lambda x: clipped_surrogate(x, behaviour, advantages, rollout, clip=CLIP).sum(), logprobs)
    clipped = clipped_tokens(log_ratio(logprobs, behaviour, rollout), advantages, clip=CLIP)
    assert torch.equal(clipped, gradient == 0)


@each_level
@given(tokens=tokens())
def test_the_surrogate_is_pessimistic(level, tokens) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    unclipped = -log_ratio(logprobs, behaviour, rollout, level=level).exp() * advantages
    loss = clipped_surrogate(logprobs, behaviour, advantages, rollout, clip=CLIP, level=level)
    assert torch.all(loss >= unclipped - 1e-12)


@each_loss
@given(tokens=tokens(), constant=st.floats(-2, 2))
def test_only_differences_from_the_denominator_make_the_ratio(loss, tokens, constant) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    gradients = [
        autograd(lambda x, c=c: loss(x + c, behaviour + c, advantages, rollout, clip=CLIP).sum(), logprobs)
        for c in (0.0, constant)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)
