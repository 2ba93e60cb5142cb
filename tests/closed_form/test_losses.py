"""Losses and KL estimators by hand.  ρ is the ratio π/μ, A the advantage, x = log(π/ref)."""

import dataclasses
import math

import pytest
import torch

from posttrain.algorithms.kl import ESTIMATORS, k1, k2, k3, of_completions
from posttrain.algorithms.losses import (
    UNBOUNDED,
    ClipRange,
    clipped_surrogate,
    clipped_tokens,
    log_ratio,
    ratio_statistics,
    weighted_policy_gradient,
)
from posttrain.algorithms.terms import KlTerm, kl_term
from posttrain.models.logprobs import distribution_kl
from tests.support.sequences import doubles, evidence_of, view_of

SYMMETRIC, ASYMMETRIC = ClipRange(low=0.2, high=0.2), ClipRange(low=0.1, high=0.3)
TOGETHER = torch.zeros(2, dtype=torch.int64)
"""Two tokens of one completion."""
LN2 = math.log(2)


def logs(*probabilities: float) -> torch.Tensor:
    return doubles(*probabilities).log()


def close(*numbers: float, rel: float = 1e-14) -> object:
    return pytest.approx([*numbers], rel=rel)


def test_the_loss_of_four_one_token_sequences_with_a_kl_term() -> None:
    # π = (.6, .4, .7, .3), reference (.5, .5, .6, .4) as denominator and for the KL: ρ = (1.2, .8, 7/6, .75).
    # -min(ρA, clip(ρ)A) = -(1.44, -.32, .58333, -.8) = (-1.44, .32, -.58333, .8), in sum -.90333.
    # k3 = ref/π - 1 - ln(ref/π) = (.0156549, .0268564, .0112936, .0456513), in sum .0994562.
    # (-.9033333 + .1 · .0994562) / 4 = -.2233469.
    logprobs, reference = logs(0.6, 0.4, 0.7, 0.3), logs(0.5, 0.5, 0.6, 0.4)
    loss = clipped_surrogate(logprobs, reference, doubles(1.2, -0.4, 0.5, -1), torch.arange(4), clip=SYMMETRIC)
    assert (0.25 * (loss + 0.1 * k3(logprobs, reference))).sum().item() == pytest.approx(-0.2233469, abs=5e-8)


def test_the_policy_gradient_loss_of_four_completions() -> None:
    # Rewards (1, -.5, 1, -1) centred: (.875, -.625, .875, -1.125).
    # -A log π: 13.3, -11.6875, 10.7625, -24.8625; in sum -12.4875, and a quarter of that is -3.121875.
    logprobs, advantages = doubles(-15.2, -18.7, -12.3, -22.1), doubles(0.875, -0.625, 0.875, -1.125)
    loss = weighted_policy_gradient(logprobs, logprobs, advantages, torch.arange(4))
    assert (0.25 * loss).sum().item() == pytest.approx(-3.121875, rel=1e-14)


@pytest.mark.parametrize(
    ("clip", "level", "ratios", "advantages", "expected"),
    [
        # A = 2: 1.5 is held at 1.2, 1.1 and .5 are not.  A = -3: .5 is held at .8, .9 and 1.5 are not.
        (SYMMETRIC, "token", [1.5, 1.1, 0.5, 0.5, 0.9, 1.5], [2, 2, 2, -3, -3, -3], [-2.4, -2.2, -1, 2.4, 2.7, 4.5]),
        # 1.25 and .85 lie inside one bound each; with the bounds exchanged the four would be -1.1, -1.1, .85, .95.
        (ASYMMETRIC, "token", [1.25, 1.5, 0.85, 0.95], [1, 1, -1, -1], [-1.25, -1.3, 0.9, 0.95]),
        # Without a lower bound a bad token can go to zero.
        (ClipRange(low=1.0, high=0.2), "token", [0.01], [-1], [0.01]),
        # A range of zero holds every favoured move.
        (ClipRange(low=0.0, high=0.0), "token", [1.1, 0.9], [1, -1], [-1, 1]),
        # The geometric mean √1.6 = 1.265 is held at 1.2 for both; the product 1.6 of A = -1 has no bound above.
        (SYMMETRIC, "sequence_mean", [2, 0.8], [1, 1], [-1.2, -1.2]),
        (SYMMETRIC, "sequence_product", [2, 0.8], [-1, -1], [1.6, 1.6]),
    ],
)
def test_the_surrogate(clip, level, ratios, advantages, expected) -> None:
    count = len(ratios)
    rollout = torch.arange(count) if level == "token" else torch.zeros(count, dtype=torch.int64)
    below = torch.full((count,), -3.0, dtype=torch.float64)
    given = (below + logs(*ratios), below, doubles(*advantages), rollout)
    assert clipped_surrogate(*given, clip=clip, level=level).tolist() == close(*expected)


def test_the_surrogate_clips_each_token_by_itself_unless_told_otherwise() -> None:
    # Two tokens of one completion, ρ = (2, .8): -1.2 and -.8.  A shared ratio would make them equal.
    loss = clipped_surrogate(logs(2, 0.8), doubles(0, 0), doubles(1, 1), TOGETHER, clip=SYMMETRIC)
    assert loss.tolist() == close(-1.2, -0.8)


@pytest.mark.parametrize(("advantage", "loss"), [(2.0, -2.4), (0.0, 0.0)])
def test_a_ratio_that_overflows_has_a_zero_gradient_where_the_clip_holds_or_there_is_no_advantage(
    advantage, loss
) -> None:
    # exp(200) is infinite in float32.  For A > 0 the loss is -(1 + .2) A, a constant.
    logprobs = torch.tensor([200.0], requires_grad=True)
    one = torch.zeros(1, dtype=torch.int64)
    found = clipped_surrogate(logprobs, torch.zeros(1), torch.tensor([advantage]), one, clip=SYMMETRIC)
    found.sum().backward()
    assert (found.item(), logprobs.grad.item()) == (pytest.approx(loss, rel=1e-6), 0)


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens_or_their_product() -> None:
    # Rollout 0: ρ = (2, .5, 8): product 8, cube root 2.  Rollout 2: ρ = (3, 12): product 36, square root 6.
    given, rollout = (logs(2, 3, 0.5, 12, 8), doubles(0, 0, 0, 0, 0)), torch.tensor([0, 2, 0, 2, 0])
    assert log_ratio(*given, rollout, level="sequence_mean").exp().tolist() == close(2, 6, 2, 6, 2)
    assert log_ratio(*given, rollout, level="sequence_product").exp().tolist() == close(8, 36, 8, 36, 8)
    # The token's ratio is the default, and divides by the behaviour.
    assert log_ratio(logs(0.6, 0.1), logs(0.3, 0.2), TOGETHER).exp().tolist() == close(2, 0.5)


@pytest.mark.parametrize(
    ("ratios", "advantages", "options", "slopes"),
    [
        # Under low .9 and high 1 weights are 2, .5 and .1.
        ([3, 0.5, 0.01], [1, -2, 1], {"clip": ClipRange(low=0.9, high=1.0)}, [-2, 1, -0.1]),
        # An unbounded weight is the ratio itself.
        ([90, 0.002], [1, 1], {"clip": UNBOUNDED}, [-90, -0.002]),
        # At sequence level tokens share the product.
        ([2, 3], [1, 1], {"level": "sequence_product"}, [-6, -6]),
    ],
)
def test_the_clipped_weight_multiplies_the_gradient_of_every_token(ratios, advantages, options, slopes) -> None:
    behaviour = doubles(-1.5, -1, -0.5)[: len(ratios)]
    logprobs = (behaviour + logs(*ratios)).requires_grad_()
    rollout = torch.zeros(len(ratios), dtype=torch.int64)
    loss = weighted_policy_gradient(logprobs, behaviour, doubles(*advantages), rollout, **options)
    loss.sum().backward()
    assert logprobs.grad.tolist() == close(*slopes)
    # The value is -w A log π, and the slope -w A.
    assert loss.tolist() == close(*[slope * each for slope, each in zip(slopes, logprobs.tolist(), strict=True)])


def test_a_token_is_clipped_where_its_ratio_left_the_range_as_its_advantage_wanted() -> None:
    # The range is .9 .. 1.3.
    ratios, advantages = logs(1.25, 1.35, 1.35, 1.35, 0.85, 0.85, 0.85, 0.95), doubles(1, 1, -1, 0, 1, -1, 0, -1)
    clipped = clipped_tokens(ratios, advantages, clip=ASYMMETRIC)
    assert clipped.tolist() == [False, True, False, False, False, True, False, False]


def test_a_ratio_exactly_on_a_bound_is_not_clipped_and_still_learns() -> None:
    logprobs = doubles(SYMMETRIC.log_highest, SYMMETRIC.log_lowest).requires_grad_()
    advantages = doubles(1, -1)
    assert clipped_tokens(logprobs.detach(), advantages, clip=SYMMETRIC).tolist() == [False, False]
    clipped_surrogate(logprobs, doubles(0, 0), advantages, torch.arange(2), clip=SYMMETRIC).sum().backward()
    assert logprobs.grad.tolist() == close(-1.2, 0.8)


def test_ratio_statistics_are_over_all_tokens() -> None:
    # Ratios 2, .25, 1: mean 3.25/3; ρ - 1 - ln ρ = 1 - ln 2, -.75 + 2 ln 2, 0: mean (.25 + ln 2)/3.
    found = ratio_statistics(logs(2.0, 0.25, 1.0))
    assert (found.mean, found.lowest, found.highest) == pytest.approx((3.25 / 3, 0.25, 2), rel=1e-14)
    assert found.kl == pytest.approx((0.25 + LN2) / 3, rel=1e-14)


@pytest.mark.parametrize("bounds", [{"low": 0.0, "high": 0.0}, {"low": 1.0, "high": math.inf}])
def test_the_extremes_of_a_clip_range_are_allowed(bounds) -> None:
    assert ClipRange(**bounds).low == bounds["low"]


@pytest.mark.parametrize("record", [ClipRange, type(ratio_statistics(torch.zeros(1)))])
def test_a_record_is_built_by_names_and_never_changed(record) -> None:
    numbers = {field.name: field.type(1) for field in dataclasses.fields(record)}  # int or float
    numbers |= {"dual": 2.0} if record is ClipRange else {}  # it is 1 + high or more
    with pytest.raises(TypeError):
        record(*numbers.values())
    built = record(**numbers)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(built, next(iter(numbers)), 0)


@pytest.mark.parametrize(
    ("name", "doubled", "halved", "three", "one"),
    [
        # x = ln 2 and -ln 2 of tokens; of a completion of three, π/ref = 2 · 1/2 · 4 = 4, and of one, 1/2.
        ("k1", LN2, -LN2, 2 * LN2, -LN2),
        ("k2", LN2**2 / 2, LN2**2 / 2, 2 * LN2**2, LN2**2 / 2),
        ("k3", 1 / 2 - 1 + LN2, 2 - 1 - LN2, -3 / 4 + 2 * LN2, 1 - LN2),  # ref/π - 1 + x: not symmetric
    ],
)
def test_an_estimate_of_a_token_and_of_a_completion_whose_log_ratios_it_adds_up(
    name, doubled, halved, three, one
) -> None:
    assert ESTIMATORS[name](logs(0.6, 0.2), logs(0.3, 0.4)).tolist() == close(doubled, halved)
    policy, reference, rollout = logs(0.6, 0.2, 0.8, 0.1), logs(0.3, 0.4, 0.2, 0.2), torch.tensor([0, 0, 0, 1])
    assert of_completions(policy, reference, rollout, estimator=name).tolist() == close(three, three, three, one)


@pytest.mark.parametrize("x", [1e-8, -1e-8])
def test_k3_resolves_a_difference_whose_square_is_far_below_one_ulp_of_one(x) -> None:
    # For small x, k3 = x²/2 - x³/6 + ...; e⁻ˣ - 1 + x written out would be lost in the rounding of e⁻ˣ.
    assert k3(doubles(x), doubles(0)).item() == pytest.approx(x**2 / 2, rel=1e-6, abs=0)


def test_the_full_divergence_sums_over_the_vocabulary_and_takes_logits_as_they_are() -> None:
    # Position 1: .5 ln(.5/.25) + .5 ln(.5/.75) = .5 ln 2 + .5 ln(2/3).  Position 2: ln(1/.9), as π is (almost) sure.
    policy = torch.stack([logs(0.5, 0.5), doubles(60.0, 0.0)])
    reference = torch.stack([logs(0.25, 0.75), logs(0.9, 0.1)])
    expected = close(0.5 * LN2 + 0.5 * math.log(2 / 3), -math.log(0.9))
    assert distribution_kl(policy, reference).tolist() == expected
    # Softmax forgets a constant added to all logits.
    assert distribution_kl(policy + 3, reference - 5).tolist() == pytest.approx(expected.expected, rel=1e-13)


def test_a_rollout_adds_up_its_own_tokens() -> None:
    # Two groups of two completions of 1, 3, 1 and 2 tokens.
    nothing, per_token = [[0.0, 0.0], [0.0, 0.0]], doubles(10.0, 1.0, 2.0, 4.0, 100.0, 20.0, 30.0)
    found = evidence_of(nothing, [[1, 3], [1, 2]], token_rewards=per_token)
    assert found.token_reward_totals.tolist() == [[10, 7], [100, 50]]
    # k1 of a completion is its log-ratio: π(y) = .5 · .2 = .1, ref(y) = .25 · .8 = .2.
    one = evidence_of([[0.0]], [[2]], token_rewards=k1(logs(0.5, 0.2), logs(0.25, 0.8)))
    assert one.token_reward_totals.item() == pytest.approx(math.log(0.1 / 0.2), rel=1e-14)


def test_at_the_reference_every_estimate_is_zero() -> None:
    same = logs(0.3, 0.7)
    for estimate in (k1(same, same), k2(same, same), k3(same, same), distribution_kl(same[None], same[None])):
        assert torch.all(estimate == 0)


K = (1 / 2 - 1 + LN2, 2 - 1 - LN2)
"""k3 at x = ln 2 and -ln 2."""
ROOT6 = math.sqrt(1.5 * 4)


@pytest.mark.parametrize(
    ("importance", "values", "slopes"),
    [
        (None, K, (1 / 2, -1)),
        # The slope of ρk is ρ(k + 1 - e⁻ˣ) = ρx.
        ("token", (1.5 * K[0], 4 * K[1]), (1.5 * LN2, -4 * LN2)),
        # √6 for both, whose log each log π moves by 1/2: √6 (1 - e⁻ˣ + (k₁ + k₂)/2).
        ("sequence_mean", (ROOT6 * K[0], ROOT6 * K[1]), (ROOT6 * (1 / 2 + sum(K) / 2), ROOT6 * (-1 + sum(K) / 2))),
    ],
)
def test_an_estimate_is_weighed_with_the_ratio_that_is_asked_for(importance, values, slopes) -> None:
    # Two tokens of one completion: π = (.6, .4), μ = (.4, .1) and ref = (.3, .8), so ρ = (1.5, 4).
    logprobs = logs(0.6, 0.4).requires_grad_()
    view = view_of(logprobs, TOGETHER, behaviour_logprobs=logs(0.4, 0.1), reference_logprobs=logs(0.3, 0.8))
    found = kl_term(KlTerm(coefficient=1.0, importance=importance)).per_token(view)
    found.sum().backward()
    assert found.tolist() == close(*values, rel=1e-12)
    assert logprobs.grad.tolist() == close(*slopes, rel=1e-12)
