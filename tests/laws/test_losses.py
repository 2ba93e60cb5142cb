"""What holds for losses of tokens and of pairs whatever the log-probs are: gradients, order, signs and clips."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.autograd import gradcheck

from posttrain.algorithms.kl import ESTIMATORS, of_completions
from posttrain.algorithms.losses import (
    ClipRange,
    clipped_surrogate,
    clipped_tokens,
    log_ratio,
    weighted_policy_gradient,
)
from posttrain.algorithms.preference_losses import PREFERENCE_LOSSES, OfPairs, PairObjective, smoothed
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


def autograd(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(function(at), at)[0]


@each_level
@settings(max_examples=25)
@given(tokens=tokens(), seed=st.integers(0, 1000))
def test_the_gradient_of_the_surrogate_is_its_finite_difference(level, tokens, seed) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    ratio = log_ratio(logprobs, behaviour, rollout, level=level)
    kinks = torch.tensor([CLIP.log_lowest, CLIP.log_highest], dtype=torch.float64)
    assume((ratio[:, None] - kinks).abs().min() > 10 * STEP)  # on a kink there is no derivative to compare with
    weights = torch.rand(len(rollout), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (weights * clipped_surrogate(x, behaviour, advantages, rollout, clip=CLIP, level=level)).sum()

    assert gradcheck(loss, logprobs.requires_grad_())


@each_level
@settings(max_examples=25)
@given(tokens=tokens())
def test_the_gradient_of_the_weighted_loss_leaves_the_weight_alone(level, tokens) -> None:
    logprobs, behaviour, advantages, rollout = tokens
    ratio = log_ratio(logprobs, behaviour, rollout, level=level).exp()
    frozen = ratio.clamp(1 - CLIP.low, 1 + CLIP.high)
    given = (behaviour, advantages, rollout)
    found = autograd(lambda x: weighted_policy_gradient(x, *given, clip=CLIP, level=level).sum(), logprobs)
    torch.testing.assert_close(found, -frozen * advantages, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(tokens=tokens())
def test_the_gradient_of_a_kl_estimate_of_tokens_or_completions_is_its_finite_difference(name, tokens) -> None:
    logprobs, reference, _, rollout = tokens
    assert gradcheck(lambda x: ESTIMATORS[name](x, reference).sum(), logprobs.requires_grad_())
    assert gradcheck(lambda x: of_completions(x, reference, rollout, estimator=name), logprobs)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_the_gradient_of_the_full_divergence_is_its_finite_difference(seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, 3, 5, generator=rng, dtype=torch.float64)
    assert gradcheck(lambda x: distribution_kl(x, reference), logits.requires_grad_())


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


each_pair_loss = pytest.mark.parametrize("name", PREFERENCE_LOSSES)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[OfPairs, OfPairs, OfPairs]:
    """log-probs under policy and reference, and lengths, of a few pairs."""
    count = draw(st.integers(1, 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def of_pairs(scale: float) -> OfPairs:
        return OfPairs(*(-scale * torch.rand(count, generator=rng, dtype=torch.float64) for _ in range(2)))

    lengths = OfPairs(*(torch.randint(1, 9, (count,), generator=rng).double() for _ in range(2)))
    return of_pairs(20), of_pairs(20), lengths


def objectives(name: str) -> list[PairObjective]:
    loss = PREFERENCE_LOSSES[name]
    return [
        PairObjective(loss=loss, beta=0.3),
        PairObjective(loss=loss, beta=0.3, label_smoothing=0.2),
        PairObjective(loss=loss, beta=1.7, length_normalized=True, nll_weight=0.4),
    ]


@each_pair_loss
@settings(max_examples=10)
@given(given=pairs())
def test_the_gradient_is_its_finite_difference(name: str, given: tuple[OfPairs, OfPairs, OfPairs]) -> None:
    policy, reference, lengths = given
    for objective in objectives(name):
        ratios = objective.log_ratios(policy, reference, lengths)
        assume(((objective.beta * (ratios.chosen - ratios.rejected)).abs() - 1).abs().min() > 1e-3)  # off the kinks
        assert gradcheck(
            lambda *at, of=objective: of.losses(OfPairs(*at), reference, lengths),
            tuple(each.clone().requires_grad_() for each in policy),
        )


@settings(max_examples=40)
@given(given=pairs(), beta=st.floats(0.01, 5))
def test_the_slope_of_the_sigmoid_loss_is_minus_beta_times_how_wrong_it_is(given, beta) -> None:
    """-β (1 - σ(β h)) for the chosen log-prob, and its opposite for the rejected one."""
    policy, reference, lengths = given
    at = torch.stack(policy).requires_grad_()
    PairObjective(beta=beta).losses(OfPairs(at[0], at[1]), reference, lengths).sum().backward()
    gaps = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    slope = -beta * (1 - 1 / (1 + torch.exp(-beta * gaps)))
    torch.testing.assert_close(at.grad, torch.stack([slope, -slope]), rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(given=pairs())
def test_with_beta_to_zero_nothing_is_told_apart(given: tuple[OfPairs, OfPairs, OfPairs]) -> None:
    """The loss goes to log 2 whatever the pair, and its slope over β to -½, that of a plain difference of log-probs."""
    policy, reference, lengths = given
    beta = 1e-9
    at = torch.stack(policy).requires_grad_()
    losses = PairObjective(beta=beta).losses(OfPairs(at[0], at[1]), reference, lengths)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), torch.full_like(losses, 2.0).log(), rtol=0, atol=1e-7)
    halves = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand_as(at)
    torch.testing.assert_close(at.grad / beta, halves, rtol=0, atol=1e-7)


@each_pair_loss
@settings(max_examples=20)
@given(given=pairs(), shift=st.floats(-30, 30))
def test_what_a_prompt_adds_to_both_answers_plays_no_part(name, given, shift) -> None:
    """Implicit rewards are known but for a constant of the prompt, and so is the loss, unless means are taken."""
    policy, reference, lengths = given
    objective = PairObjective(loss=PREFERENCE_LOSSES[name], beta=0.3, label_smoothing=0.1)
    moved = OfPairs(reference.chosen + shift, reference.rejected + shift)
    found, expected = (objective.losses(policy, each, lengths) for each in (moved, reference))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@each_pair_loss
@settings(max_examples=20)
@given(given=pairs())
def test_labels_that_are_wrong_half_of_the_time_are_learned_either_way_alike(name, given) -> None:
    policy, reference, _ = given
    gaps = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    loss = PREFERENCE_LOSSES[name]
    there = smoothed(loss, gaps, beta=0.3, label_smoothing=0.5)
    torch.testing.assert_close(there, smoothed(loss, -gaps, beta=0.3, label_smoothing=0.5), rtol=1e-12, atol=1e-12)


@each_pair_loss
def test_a_larger_gap_is_never_a_larger_loss_up_to_where_the_loss_ends(name: str) -> None:
    ends = {"sigmoid": 100.0, "robust": 100.0, "hinge": 100.0, "ipo": 1 / (2 * 0.3)}
    gaps = torch.linspace(-50, ends[name], 200, dtype=torch.float64)
    losses = PREFERENCE_LOSSES[name](gaps, beta=0.3)
    assert bool((losses.diff() <= 0).all())
    assert losses[0] > losses[-1]
