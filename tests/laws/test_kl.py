"""Every entry of the table in posttrain/kl.py, by enumerating the vocabulary of a small softmax."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algorithms.kl import ESTIMATORS, k1, k2, k3, of_completions
from posttrain.models.logprobs import distribution_kl

LOGITS = st.lists(st.floats(-3, 3), min_size=2, max_size=6)


@st.composite
def policies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, which want a gradient, and of a reference over the same vocabulary."""
    logits = draw(LOGITS)
    reference = draw(st.lists(st.floats(-3, 3), min_size=len(logits), max_size=len(logits)))
    return torch.tensor(logits, dtype=torch.float64, requires_grad=True), torch.tensor(reference, dtype=torch.float64)


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=atol)


@given(policies())
def test_in_expectation_k1_and_k3_and_the_full_sum_are_the_divergence(case) -> None:
    logits, reference = case
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    expected = divergence(log_p, log_q)
    assert_same((log_p.exp() * k1(log_p, log_q)).sum(), expected)
    assert_same((log_p.exp() * k3(log_p, log_q)).sum(), expected)
    assert_same(distribution_kl(logits[None], reference[None])[0], expected)


@given(policies())
def test_k2_and_k3_are_never_negative(case) -> None:
    logits, reference = case
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    assert torch.all(k2(log_p, log_q) >= 0)
    assert torch.all(k3(log_p, log_q) >= 0)


@given(st.floats(-30, 30), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_never_negative_however_small_the_difference(log_difference, dtype) -> None:
    reference = torch.tensor([-1.0], dtype=dtype)
    for sign in (-1, 1):
        moved = reference + sign * math.exp(-abs(log_difference))
        assert torch.all(k3(moved, reference) >= 0)


@given(policies())
def test_in_the_loss_k1_has_no_gradient_k2_and_full_that_of_the_divergence_and_k3_the_other_directions(case) -> None:
    logits, reference = case
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    sampled = log_p.exp().detach()  # how often each token is drawn: a sample's frequency has no gradient
    reverse, forward = gradient(divergence(log_p, log_q), logits), gradient(divergence(log_q, log_p), logits)
    assert_same(gradient((sampled * k1(log_p, log_q)).sum(), logits), torch.zeros_like(logits))
    assert_same(gradient((sampled * k2(log_p, log_q)).sum(), logits), reverse)
    assert_same(gradient((sampled * k3(log_p, log_q)).sum(), logits), forward)
    assert_same(gradient(distribution_kl(logits[None], reference[None]).sum(), logits), reverse)


def in_reward(name: str, log_p: torch.Tensor, log_q: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Expected gradient of a penalty's value times log π."""
    penalty = ESTIMATORS[name](log_p, log_q).detach()
    return gradient((log_p.exp().detach() * penalty * log_p).sum(), logits)


@given(policies(), st.integers(0, 1000))
def test_k3_of_completions_in_the_loss_has_the_gradient_of_the_other_direction_between_whole_completions(
    case, seed
) -> None:
    # Two tokens, the second of which depends on the first: every completion is enumerated.
    logits, reference = case
    width = len(logits)
    rng = torch.Generator().manual_seed(seed)
    after, reference_after = torch.randn(2, width, width, generator=rng, dtype=torch.float64)
    first, second = logits.log_softmax(0), (after + logits).log_softmax(1)
    tokens = torch.stack([first[:, None].expand(width, width), second], dim=-1).reshape(-1)
    other = reference.log_softmax(0)[:, None].expand(width, width)
    others = torch.stack([other, reference_after.log_softmax(1)], dim=-1).reshape(-1)
    rollout = torch.arange(width**2).repeat_interleave(2)
    wholes, whole_others = (each.view(-1, 2).sum(1) for each in (tokens, others))
    estimates = of_completions(tokens, others, rollout, estimator="k3").view(-1, 2)[:, 0]
    forward = gradient(divergence(whole_others, wholes), logits)
    assert_same(gradient((wholes.exp().detach() * estimates).sum(), logits), forward)
    torch.testing.assert_close(
        (wholes.exp() * estimates).sum(), divergence(wholes, whole_others), rtol=1e-9, atol=1e-12
    )


@given(policies())
def test_in_the_reward_k1_has_the_gradient_of_the_divergence_and_the_others_have_not(case) -> None:
    logits, reference = case
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    reverse, forward = gradient(divergence(log_p, log_q), logits), gradient(divergence(log_q, log_p), logits)
    value_of_k2 = (log_p.exp() * k2(log_p, log_q)).sum()
    assert_same(in_reward("k1", log_p, log_q, logits), reverse)
    assert_same(in_reward("k2", log_p, log_q, logits), gradient(value_of_k2, logits) - reverse)
    assert_same(in_reward("k3", log_p, log_q, logits), reverse - forward)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_near_the_reference_k2_and_k3_in_the_reward_lose_their_force(name) -> None:
    # A tenfold smaller step away from the reference makes a first-order force ten times smaller, theirs a hundred.
    reference = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64)
    forces = []
    for step in (1e-2, 1e-3):
        logits = (reference + step * torch.tensor([1.0, 2.0, -1.5])).double().requires_grad_()
        forces.append(in_reward(name, logits.log_softmax(0), reference.log_softmax(0), logits).norm().item())
    assert forces[0] / forces[1] == pytest.approx(100, rel=0.05)


def test_the_value_of_k2_is_right_to_second_order() -> None:
    # A tenfold smaller step makes KL a hundred times smaller, the error of k2 a thousand.
    reference = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64)
    errors = []
    for step in (1e-2, 1e-3):
        log_p = (reference + step * torch.tensor([1.0, 2.0, -1.5])).double().log_softmax(0)
        log_q = reference.log_softmax(0)
        errors.append(((log_p.exp() * k2(log_p, log_q)).sum() - divergence(log_p, log_q)).item())
    assert errors[0] / errors[1] == pytest.approx(1000, rel=0.05)
