"""Every estimator of KL, by enumerating a small softmax; and corrections for samples of another policy."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.algorithms.correction import MASK_LEVEL, Correction, correction_weights
from posttrain.algorithms.kl import ESTIMATORS, k1, k2, k3, of_completions
from posttrain.algorithms.table import build_algorithm
from posttrain.models.logprobs import distribution_kl
from tests.support.enumerated import COMPLETIONS, Tree
from tests.support.tiny import BY_REWARD, advantage, token_loss

LOGITS = st.lists(st.floats(-3, 3), min_size=2, max_size=6)


@st.composite
def policies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, which want a gradient, their log-probs, and those of a reference over the same vocabulary."""
    logits = draw(LOGITS)
    reference = draw(st.lists(st.floats(-3, 3), min_size=len(logits), max_size=len(logits)))
    mine = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    return mine, mine.log_softmax(0), torch.tensor(reference, dtype=torch.float64).log_softmax(0)


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=atol)


@given(policies())
def test_in_expectation_k1_and_k3_and_the_full_sum_are_the_divergence(case) -> None:
    logits, log_p, log_q = case
    expected = divergence(log_p, log_q)
    assert_same((log_p.exp() * k1(log_p, log_q)).sum(), expected)
    assert_same((log_p.exp() * k3(log_p, log_q)).sum(), expected)
    assert_same(distribution_kl(logits[None], log_q[None])[0], expected)


@given(policies())
def test_k2_and_k3_are_never_negative(case) -> None:
    _, log_p, log_q = case
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
    logits, log_p, log_q = case
    sampled = log_p.exp().detach()  # how often each token is drawn: a sample's frequency has no gradient
    reverse, forward = gradient(divergence(log_p, log_q), logits), gradient(divergence(log_q, log_p), logits)
    assert_same(gradient((sampled * k1(log_p, log_q)).sum(), logits), torch.zeros_like(logits))
    assert_same(gradient((sampled * k2(log_p, log_q)).sum(), logits), reverse)
    assert_same(gradient((sampled * k3(log_p, log_q)).sum(), logits), forward)
    assert_same(gradient(distribution_kl(logits[None], log_q[None]).sum(), logits), reverse)


def in_reward(name: str, log_p: torch.Tensor, log_q: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Expected gradient of a penalty's value times log π."""
    penalty = ESTIMATORS[name](log_p, log_q).detach()
    return gradient((log_p.exp().detach() * penalty * log_p).sum(), logits)


@given(policies(), st.integers(0, 1000))
def test_k3_of_completions_in_the_loss_has_the_gradient_of_the_other_direction(case, seed) -> None:
    # Two tokens, the second of which depends on the first: every completion is enumerated.
    logits, first, log_q = case
    width = len(logits)
    rng = torch.Generator().manual_seed(seed)
    after, reference_after = torch.randn(2, width, width, generator=rng, dtype=torch.float64)
    second = (after + logits).log_softmax(1)
    tokens = torch.stack([first[:, None].expand(width, width), second], dim=-1).reshape(-1)
    other = log_q[:, None].expand(width, width)
    others = torch.stack([other, reference_after.log_softmax(1)], dim=-1).reshape(-1)
    rollout = torch.arange(width**2).repeat_interleave(2)
    wholes, whole_others = (each.view(-1, 2).sum(1) for each in (tokens, others))
    estimates = of_completions(tokens, others, rollout, estimator="k3").view(-1, 2)[:, 0]
    forward = gradient(divergence(whole_others, wholes), logits)
    assert_same(gradient((wholes.exp().detach() * estimates).sum(), logits), forward)
    assert_same((wholes.exp() * estimates).sum(), divergence(wholes, whole_others))


@given(policies())
def test_in_the_reward_k1_has_the_gradient_of_the_divergence_and_the_others_have_not(case) -> None:
    logits, log_p, log_q = case
    reverse, forward = gradient(divergence(log_p, log_q), logits), gradient(divergence(log_q, log_p), logits)
    value_of_k2 = (log_p.exp() * k2(log_p, log_q)).sum()
    assert_same(in_reward("k1", log_p, log_q, logits), reverse)
    assert_same(in_reward("k2", log_p, log_q, logits), gradient(value_of_k2, logits) - reverse)
    assert_same(in_reward("k3", log_p, log_q, logits), reverse - forward)


def near_the_reference(step: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As of `policies`, a step away from the reference."""
    reference = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64)
    logits = (reference + step * torch.tensor([1.0, 2.0, -1.5])).double().requires_grad_()
    return logits, logits.log_softmax(0), reference.log_softmax(0)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_near_the_reference_k2_and_k3_in_the_reward_lose_their_force(name) -> None:
    # A tenfold smaller step away from the reference makes a first-order force ten times smaller, theirs a hundred.
    cases = [near_the_reference(step) for step in (1e-2, 1e-3)]
    far, near = (in_reward(name, log_p, log_q, logits).norm().item() for logits, log_p, log_q in cases)
    assert far / near == pytest.approx(100, rel=0.05)


def test_the_value_of_k2_is_right_to_second_order() -> None:
    # A tenfold smaller step makes KL a hundred times smaller, the error of k2 a thousand.
    cases = [near_the_reference(step) for step in (1e-2, 1e-3)]
    far, near = ((p.exp() * k2(p, q)).sum() - divergence(p, q) for _, p, q in cases)
    assert (far / near).item() == pytest.approx(1000, rel=0.05)


LEVELS = st.sampled_from(["token", "sequence_mean", "sequence_product"])
CORRECTIONS = st.builds(
    dict,
    level=LEVELS,
    truncate=st.none() | st.floats(1, 5),
    mask_low=st.none() | st.floats(0, 1),
    mask_high=st.none() | st.floats(1, 5),
    mask_level=LEVELS,
).map(lambda options: options if masks(options) else {**options, "mask_level": MASK_LEVEL})
"""Without a bound there is nothing that a level could be of."""


def masks(options: dict[str, object]) -> bool:
    return options["mask_low"] is not None or options["mask_high"] is not None


def some_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """log π, log μ, advantages and rollouts of some completions."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (4,), generator=rng)
    rollout = torch.arange(4).repeat_interleave(lengths)
    behaviour = -torch.rand(len(rollout), generator=rng, dtype=torch.float64) * 3
    logprobs = behaviour + 0.4 * torch.randn(len(rollout), generator=rng, dtype=torch.float64)
    advantages = torch.randn(4, generator=rng, dtype=torch.float64)[rollout]
    return logprobs, behaviour, advantages, rollout


@pytest.mark.parametrize("name", BY_REWARD)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), options=CORRECTIONS)
def test_samples_of_the_policy_that_the_step_starts_from_need_no_correction(name, seed, options) -> None:
    logprobs, behaviour, advantages, rollout = some_tokens(seed)
    found = []
    for config in ({"name": name}, {"name": name, "correction": options}):
        now = logprobs.clone().requires_grad_()
        losses = token_loss(build_algorithm(config), now, behaviour, advantages, rollout, proximal=behaviour)
        losses.sum().backward()
        found.append((losses.detach(), now.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), options=CORRECTIONS)
def test_no_weight_is_above_the_bound_and_only_what_is_masked_has_none(seed, options) -> None:
    proximal, behaviour, _, rollout = some_tokens(seed)
    weights, truncated, masked = correction_weights(proximal, behaviour, rollout, correction=Correction(**options))
    bound = options["truncate"] or float("inf")
    assert ((weights == 0) == masked).all()
    assert (weights <= bound * (1 + 1e-12)).all()
    assert (truncated <= (weights >= bound * (1 - 1e-12))).all()
    if options["mask_level"] != "token":
        assert all(len(set(masked[rollout == i].tolist())) == 1 for i in range(4))


def corrected_gradient(policy: Tree, behaviour: Tree, correction: dict[str, object]) -> torch.Tensor:
    """Expected gradient of RLOO on a group of two completions, over all pairs that `behaviour` can sample."""
    algorithm = build_algorithm({"name": "rloo", "correction": correction})
    now, then = policy.token_logprobs(), [tokens.detach() for tokens in behaviour.token_logprobs()]
    chance = torch.stack([tokens.sum() for tokens in then]).exp()
    pairs = torch.tensor(list(itertools.product(range(len(COMPLETIONS)), repeat=2)))
    sampled = pairs.flatten().tolist()
    lengths = torch.tensor([len(COMPLETIONS[i]) for i in sampled])
    rollout = torch.arange(len(sampled)).repeat_interleave(lengths)
    advantages = advantage(algorithm, policy.rewards[pairs]).flatten()[rollout]
    tokens, log_mu = torch.cat([now[i] for i in sampled]), torch.cat([then[i] for i in sampled])
    losses = token_loss(algorithm, tokens, log_mu, advantages, rollout, proximal=tokens.detach())
    # Two completions in a group: each token weighs 1/2 of its pair.
    expected = (chance[pairs].prod(dim=1).repeat_interleave(2)[rollout] * losses).sum() / 2
    return torch.autograd.grad(expected, policy.logits)[0]


@pytest.fixture(scope="module")
def trees() -> tuple[Tree, Tree, torch.Tensor]:
    """A policy, an older one, and the true gradient of the first."""
    policy, older = Tree(seed=1), Tree(seed=1)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(3)
        older.logits += 0.5 * torch.randn(older.logits.shape, generator=noise, dtype=torch.float64)
    chance = torch.stack([tokens.sum() for tokens in policy.token_logprobs()]).exp()
    return policy, older, torch.autograd.grad(-(chance @ policy.rewards), policy.logits)[0]


def test_whole_importance_weights_give_the_gradient_of_samples_that_were_never_drawn(trees) -> None:
    policy, older, true = trees
    actual = corrected_gradient(policy, older, {"level": "sequence_product", "truncate": None})
    torch.testing.assert_close(actual, true, rtol=1e-12, atol=1e-14)


def test_weights_of_tokens_and_truncated_ones_are_nearer_to_it_than_none_and_not_there(trees) -> None:
    policy, older, true = trees
    nothing = {"level": None, "mask_high": 1e9}  # a mask that lets all through: samples pass for the policy's own
    made = (nothing, {"truncate": None}, {"level": "sequence_product", "truncate": 1.1})
    uncorrected, *others = ((corrected_gradient(policy, older, each) - true).norm().item() for each in made)
    assert all(1e-3 < away < uncorrected for away in others)


def test_what_is_masked_has_no_gradient_and_makes_the_rest_no_heavier() -> None:
    logprobs, behaviour, advantages, rollout = some_tokens(5)
    proximal = behaviour + torch.where(rollout == 1, 1.0, 0.0)
    found = []
    for correction in ({"truncate": None}, {"truncate": None, "mask_high": 2.0}):
        now = logprobs.clone().requires_grad_()
        algorithm = build_algorithm({"name": "cispo", "correction": correction})
        token_loss(algorithm, now, behaviour, advantages, rollout, proximal=proximal).sum().backward()
        found.append(now.grad)
    assert (found[1][rollout == 1] == 0).all()
    assert (found[0][rollout == 1] != 0).all()
    assert torch.equal(found[0][rollout != 1], found[1][rollout != 1])
