"""What holds for samples of another policy: nothing changes where there is none, and untruncated nothing is biased."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms.correction import MASK_LEVEL, Correction, correction_weights
from posttrain.algorithms.table import build_algorithm
from tests.support.enumerated import COMPLETIONS, Tree
from tests.support.tiny import BY_REWARD, advantage, token_loss

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
    away = {
        name: (corrected_gradient(policy, older, options) - true).norm().item()
        for name, options in {
            "nothing": nothing,
            "token": {"truncate": None},
            "truncated": {"level": "sequence_product", "truncate": 1.1},
        }.items()
    }
    assert 1e-3 < away["token"] < away["nothing"]
    assert 1e-3 < away["truncated"] < away["nothing"]


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
