"""Losses by hand.  ρ is the ratio π/μ, A the advantage; every expected value is worked out in a comment."""

import dataclasses
import math

import pytest
import torch

from posttrain.algorithms.kl import k3
from posttrain.algorithms.losses import (
    UNBOUNDED,
    ClipRange,
    clipped_surrogate,
    clipped_tokens,
    log_ratio,
    ratio_statistics,
    weighted_policy_gradient,
)

SYMMETRIC = ClipRange(low=0.2, high=0.2)


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def surrogate_at(ratios: list[float], advantages: list[float], clip: ClipRange, level: str = "token") -> list[float]:
    """One token per rollout at a token level; at a sequence level the tokens are those of rollout 0."""
    count = len(ratios)
    rollout = torch.arange(count) if level == "token" else torch.zeros(count, dtype=torch.int64)
    denominator = values(*[-3.0] * count)
    loss = clipped_surrogate(
        denominator + values(*ratios).log(), denominator, values(*advantages), rollout, clip=clip, level=level
    )
    return loss.tolist()


def test_the_loss_of_four_one_token_sequences_with_a_kl_term() -> None:
    # π = (.6, .4, .7, .3), reference (.5, .5, .6, .4) as denominator and for the KL: ρ = (1.2, .8, 7/6, .75).
    # -min(ρA, clip(ρ)A) = -(1.44, -.32, .58333, -.8) = (-1.44, .32, -.58333, .8), in sum -.90333.
    # k3 = ref/π - 1 - ln(ref/π) = (.0156549, .0268564, .0112936, .0456513), in sum .0994562.
    # (-.9033333 + .1 · .0994562) / 4 = -.2233469.
    logprobs, reference = values(0.6, 0.4, 0.7, 0.3).log(), values(0.5, 0.5, 0.6, 0.4).log()
    advantages = values(1.2, -0.4, 0.5, -1)
    loss = clipped_surrogate(logprobs, reference, advantages, torch.arange(4), clip=SYMMETRIC)
    total = (0.25 * (loss + 0.1 * k3(logprobs, reference))).sum()
    assert total.item() == pytest.approx(-0.2233469, abs=5e-8)


def test_the_policy_gradient_loss_of_four_completions() -> None:
    # Rewards (1, -.5, 1, -1) centred: (.875, -.625, .875, -1.125).
    # -A log π: 13.3, -11.6875, 10.7625, -24.8625; in sum -12.4875, and a quarter of that is -3.121875.
    logprobs, advantages = values(-15.2, -18.7, -12.3, -22.1), values(0.875, -0.625, 0.875, -1.125)
    loss = weighted_policy_gradient(logprobs, logprobs, advantages, torch.arange(4))
    assert (0.25 * loss).sum().item() == pytest.approx(-3.121875, rel=1e-14)


def test_the_surrogate_off_the_kinks() -> None:
    # A = 2:   ρ = 1.5 is held at 1.2: -2.4;   ρ = 1.1 and ρ = .5 are not: -2.2, -1.
    # A = -3:  ρ = .5 is held at .8: 2.4;      ρ = .9 and ρ = 1.5 are not: 2.7, 4.5.
    loss = surrogate_at([1.5, 1.1, 0.5, 0.5, 0.9, 1.5], [2, 2, 2, -3, -3, -3], SYMMETRIC)
    assert loss == pytest.approx([-2.4, -2.2, -1, 2.4, 2.7, 4.5], rel=1e-14)


def test_the_two_bounds_are_not_interchangeable() -> None:
    # low .1, high .3: 1.25 and .85 lie inside one bound each; A = 1: 1.25 kept, 1.5 → 1.3; A = -1: .85 → .9, .95 kept.
    # With the bounds exchanged the four would be -1.1, -1.1, .85, .95.
    loss = surrogate_at([1.25, 1.5, 0.85, 0.95], [1, 1, -1, -1], ClipRange(low=0.1, high=0.3))
    assert loss == pytest.approx([-1.25, -1.3, 0.9, 0.95], rel=1e-14)


def test_without_a_lower_bound_a_bad_token_can_go_to_zero() -> None:
    assert surrogate_at([0.01], [-1], ClipRange(low=1.0, high=0.2)) == pytest.approx([0.01], rel=1e-14)


def test_a_zero_clip_range_holds_every_favoured_move() -> None:
    assert surrogate_at([1.1, 0.9], [1, -1], ClipRange(low=0.0, high=0.0)) == pytest.approx([-1, 1], rel=1e-14)


def test_a_ratio_that_overflows_has_a_zero_gradient_where_the_clip_holds() -> None:
    # exp(200) is infinite in float32.  For A > 0 the loss is -(1 + .2) A, a constant.
    logprobs = torch.tensor([200.0], requires_grad=True)
    loss = clipped_surrogate(
        logprobs, torch.zeros(1), torch.tensor([2.0]), torch.zeros(1, dtype=torch.int64), clip=SYMMETRIC
    )
    loss.sum().backward()
    assert loss.item() == pytest.approx(-2.4, rel=1e-6)
    assert logprobs.grad.item() == 0


def test_a_token_without_advantage_costs_nothing_even_where_its_ratio_overflows() -> None:
    loss = clipped_surrogate(
        torch.tensor([200.0]), torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64), clip=SYMMETRIC
    )
    assert loss.item() == 0


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    # Rollout 0: ρ = (2, .5, 8): product 8, cube root 2.  Rollout 2: ρ = (3, 12): product 36, square root 6.
    logs = values(2, 3, 0.5, 12, 8).log()
    rollout = torch.tensor([0, 2, 0, 2, 0])
    mean = log_ratio(logs, values(0, 0, 0, 0, 0), rollout, level="sequence_mean")
    product = log_ratio(logs, values(0, 0, 0, 0, 0), rollout, level="sequence_product")
    assert mean.exp().tolist() == pytest.approx([2, 6, 2, 6, 2], rel=1e-14)
    assert product.exp().tolist() == pytest.approx([8, 36, 8, 36, 8], rel=1e-14)


def test_the_token_ratio_is_the_default_and_divides_by_the_behaviour() -> None:
    ratio = log_ratio(values(0.6, 0.1).log(), values(0.3, 0.2).log(), torch.tensor([0, 0])).exp()
    assert ratio.tolist() == pytest.approx([2, 0.5], rel=1e-14)


def test_the_surrogate_clips_each_token_by_itself_unless_told_otherwise() -> None:
    # Two tokens of one completion, ρ = (2, .8): -1.2 and -.8.  A shared ratio would make them equal.
    loss = clipped_surrogate(
        values(2, 0.8).log(), values(0, 0), values(1, 1), torch.zeros(2, dtype=torch.int64), clip=SYMMETRIC
    )
    assert loss.tolist() == pytest.approx([-1.2, -0.8], rel=1e-14)


def test_a_sequence_is_clipped_as_a_whole() -> None:
    # ρ = (2, .8): as tokens -1.2 and -.8; their geometric mean √1.6 = 1.265 is held at 1.2 for both.
    assert surrogate_at([2, 0.8], [1, 1], SYMMETRIC) == pytest.approx([-1.2, -0.8], rel=1e-14)
    assert surrogate_at([2, 0.8], [1, 1], SYMMETRIC, "sequence_mean") == pytest.approx([-1.2, -1.2], rel=1e-14)
    # The product 1.6 of A = -1 is not bounded from above.
    assert surrogate_at([2, 0.8], [-1, -1], SYMMETRIC, "sequence_product") == pytest.approx([1.6, 1.6], rel=1e-14)


def test_the_clipped_weight_multiplies_the_gradient_of_every_token() -> None:
    # ρ = (3, .5, .01) under low .9, high 1: weights 2, .5, .1, times A = (1, -2, 1).
    behaviour = values(-1.5, -1, -0.5)
    logprobs = (behaviour + values(3, 0.5, 0.01).log()).requires_grad_()
    advantages = values(1, -2, 1)
    loss = weighted_policy_gradient(logprobs, behaviour, advantages, torch.arange(3), clip=ClipRange(low=0.9, high=1.0))
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2, 1, -0.1], rel=1e-14)
    # The value is -w A log π, with log π = (-1.5 + ln 3, -1 - ln 2, -.5 - ln 100).
    expected = [-2 * (-1.5 + math.log(3)), 1 * (-1 - math.log(2)), -0.1 * (-0.5 - math.log(100))]
    assert loss.tolist() == pytest.approx(expected, rel=1e-14)


def test_an_unbounded_weight_is_the_ratio_itself() -> None:
    logprobs = values(0.9, 0.001).log().requires_grad_()
    behaviour = values(0.01, 0.5).log()
    rollout = torch.zeros(2, dtype=torch.int64)
    weighted_policy_gradient(logprobs, behaviour, values(1, 1), rollout, clip=UNBOUNDED).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-90, -0.002], rel=1e-14)


def test_a_weight_at_sequence_level_is_shared_by_the_tokens() -> None:
    # ρ = (2, 3): product 6.
    logprobs = values(2, 3).log().requires_grad_()
    rollout = torch.zeros(2, dtype=torch.int64)
    loss = weighted_policy_gradient(logprobs, values(0, 0), values(1, 1), rollout, level="sequence_product")
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-6, -6], rel=1e-14)


def test_a_token_is_clipped_where_its_ratio_left_the_range_as_its_advantage_wanted() -> None:
    # The range is .9 .. 1.3.
    ratios = values(1.25, 1.35, 1.35, 1.35, 0.85, 0.85, 0.85, 0.95)
    advantages = values(1, 1, -1, 0, 1, -1, 0, -1)
    clipped = clipped_tokens(ratios.log(), advantages, clip=ClipRange(low=0.1, high=0.3))
    assert clipped.tolist() == [False, True, False, False, False, True, False, False]


def test_a_ratio_exactly_on_a_bound_is_not_clipped_and_still_learns() -> None:
    logprobs = values(SYMMETRIC.log_highest, SYMMETRIC.log_lowest).requires_grad_()
    advantages = values(1, -1)
    assert clipped_tokens(logprobs.detach(), advantages, clip=SYMMETRIC).tolist() == [False, False]
    clipped_surrogate(logprobs, values(0, 0), advantages, torch.arange(2), clip=SYMMETRIC).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.2, 0.8], rel=1e-14)


def test_ratio_statistics_are_over_all_tokens() -> None:
    # Ratios 2, .25, 1: mean 3.25/3; ρ - 1 - ln ρ = 1 - ln 2, -.75 + 2 ln 2, 0: mean (.25 + ln 2)/3.
    statistics = ratio_statistics(torch.tensor([2.0, 0.25, 1.0], dtype=torch.float64).log())
    assert statistics.mean == pytest.approx(3.25 / 3, rel=1e-14)
    assert (statistics.lowest, statistics.highest) == pytest.approx((0.25, 2), rel=1e-14)
    assert statistics.kl == pytest.approx((0.25 + math.log(2)) / 3, rel=1e-14)


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
