"""What holds for losses of pairs whatever the log-probs are: slopes, signs, and what they do not depend on."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.algorithms.preference_losses import PREFERENCE_LOSSES, OfPairs, PairObjective, smoothed

STEP = 1e-5
each_loss = pytest.mark.parametrize("name", PREFERENCE_LOSSES)


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


def assert_off_kinks(objective: PairObjective, *given: OfPairs) -> None:
    ratios = objective.log_ratios(*given)
    scaled = objective.beta * (ratios.chosen - ratios.rejected)
    assume((scaled.abs() - 1).abs().min() > 100 * STEP)


@each_loss
@settings(max_examples=10)
@given(given=pairs())
def test_the_gradient_is_its_finite_difference(name: str, given: tuple[OfPairs, OfPairs, OfPairs]) -> None:
    policy, reference, lengths = given
    for objective in objectives(name):
        assert_off_kinks(objective, policy, reference, lengths)
        at = torch.stack(policy).requires_grad_()
        objective.losses(OfPairs(at[0], at[1]), reference, lengths).sum().backward()
        assert at.grad is not None
        for place in [(row, column) for row in range(2) for column in range(at.shape[1])]:
            sides = []
            for sign in (1, -1):
                moved = at.detach().clone()
                moved[place] += sign * STEP
                sides.append(objective.losses(OfPairs(moved[0], moved[1]), reference, lengths).sum().item())
            assert at.grad[place].item() == pytest.approx((sides[0] - sides[1]) / (2 * STEP), rel=1e-5, abs=1e-7)


@settings(max_examples=40)
@given(given=pairs(), beta=st.floats(0.01, 5))
def test_the_slope_of_the_sigmoid_loss_is_minus_beta_times_how_wrong_it_is(
    given: tuple[OfPairs, OfPairs, OfPairs], beta: float
) -> None:
    """-β (1 - σ(β h)) for the chosen log-prob, and its opposite for the rejected one."""
    policy, reference, lengths = given
    at = torch.stack(policy).requires_grad_()
    PairObjective(beta=beta).losses(OfPairs(at[0], at[1]), reference, lengths).sum().backward()
    gaps = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    slope = -beta * (1 - 1 / (1 + torch.exp(-beta * gaps)))
    assert at.grad is not None
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
    assert at.grad is not None
    halves = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand_as(at)
    torch.testing.assert_close(at.grad / beta, halves, rtol=0, atol=1e-7)


@each_loss
@settings(max_examples=20)
@given(given=pairs(), shift=st.floats(-30, 30))
def test_what_a_prompt_adds_to_both_answers_plays_no_part(
    name: str, given: tuple[OfPairs, OfPairs, OfPairs], shift: float
) -> None:
    """Implicit rewards are known but for a constant of the prompt, and so is the loss, unless means are taken."""
    policy, reference, lengths = given
    objective = PairObjective(loss=PREFERENCE_LOSSES[name], beta=0.3, label_smoothing=0.1)
    moved = OfPairs(reference.chosen + shift, reference.rejected + shift)
    torch.testing.assert_close(
        objective.losses(policy, moved, lengths), objective.losses(policy, reference, lengths), rtol=1e-9, atol=1e-9
    )


@each_loss
@settings(max_examples=20)
@given(given=pairs())
def test_labels_that_are_wrong_half_of_the_time_are_learned_either_way_alike(
    name: str, given: tuple[OfPairs, OfPairs, OfPairs]
) -> None:
    policy, reference, _ = given
    gaps = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    loss = PREFERENCE_LOSSES[name]
    there = smoothed(loss, gaps, beta=0.3, label_smoothing=0.5)
    torch.testing.assert_close(there, smoothed(loss, -gaps, beta=0.3, label_smoothing=0.5), rtol=1e-12, atol=1e-12)


@each_loss
def test_a_larger_gap_is_never_a_larger_loss_up_to_where_the_loss_ends(name: str) -> None:
    ends = {"sigmoid": 100.0, "robust": 100.0, "hinge": 100.0, "ipo": 1 / (2 * 0.3)}
    gaps = torch.linspace(-50, ends[name], 200, dtype=torch.float64)
    losses = PREFERENCE_LOSSES[name](gaps, beta=0.3)
    assert bool((losses.diff() <= 0).all())
    assert losses[0] > losses[-1]
