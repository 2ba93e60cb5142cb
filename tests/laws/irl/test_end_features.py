"""Features of pairs beside those of ends: totals, derivatives and policies."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.counting import discounted_counts, in_world
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.feasibility import smallest_gap
from posttrain.irl.features import LinearReward
from posttrain.irl.objectives import Dual, Likelihood
from posttrain.irl.planning import Problem, soft_policy_iteration
from tests.support.irl_worlds import random_world, slopes
from tests.support.refusals import refused

CASES = given(
    seed=st.integers(0, 10_000),
    discount=st.sampled_from([0.8, 1.0]),
    horizon=st.sampled_from([None, 4]),
    sparse=st.booleans(),
)
WEIGHTS = np.array([-4.0, 0.4, -0.3])


def pairs_and_ends(rng: np.random.Generator, mdp, *, sparse: bool) -> LinearReward:
    pairs, ends = rng.normal(size=(18, 3)), rng.normal(size=(6, 3))
    pairs[:, 0] = 1
    made = csr_array if sparse else np.asarray
    return LinearReward(features=made(pairs), on="state_action", ends=made(ends))


@settings(max_examples=30)
@CASES
def test_derivatives_are_finite_differences(seed, discount, horizon, sparse) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=2)
    reward = pairs_and_ends(rng, mdp, sparse=sparse)
    setting = MaxCausalEntIRL(discount=discount, horizon=horizon).setting(reward.bound(mdp), mdp.start)
    counts = rng.random((6, 3)) if horizon is None else rng.random((4, 6, 3))
    counts[..., mdp.terminal, :] = 0
    for objective in (Dual(setting, rng.normal(size=3)), Likelihood(setting, counts)):
        point = objective.at(WEIGHTS)
        gradient = slopes(lambda w, at=objective.at: np.array(at(w).value), WEIGHTS)
        np.testing.assert_allclose(point.gradient, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())
        hessian = slopes(lambda w, at=objective.at: at(w).gradient, WEIGHTS)
        np.testing.assert_allclose(point.hessian, hessian, rtol=0, atol=1e-6 * np.abs(hessian).max())


@pytest.mark.parametrize("discount", [0.8, 1.0])
def test_features_of_states_are_pairs_of_any_action_and_ends(discount) -> None:
    rng = np.random.default_rng(1)
    mdp, features = random_world(rng, num_ends=2), np.column_stack([np.ones(6), rng.normal(size=(6, 2))])
    both = LinearReward(features=np.repeat(features, 3, axis=0), on="state_action", ends=features)
    walks = sample_demonstrations(mdp, np.full((6, 3), 1 / 3), num_episodes=50, rng=2)
    irl = MaxCausalEntIRL(discount=discount)
    fits = [irl.fit(mdp, reward, walks) for reward in (LinearReward(features=features), both)]
    np.testing.assert_allclose(fits[1].weights, fits[0].weights, rtol=1e-6)
    np.testing.assert_allclose(fits[1].moments, fits[0].moments, rtol=1e-12)
    np.testing.assert_allclose(fits[1].expected, fits[0].expected, rtol=1e-9)
    gaps = [smallest_gap(fit.setting, fit.moments) for fit in fits]
    assert gaps[1] == pytest.approx(gaps[0], abs=1e-9)
    known = in_world(walks, mdp)
    episodes = both.bound(mdp).per_episode(known, discount)
    np.testing.assert_allclose(episodes, LinearReward(features=features).bound(mdp).per_episode(known, discount))
    counted = both.bound(mdp).observed(discounted_counts(known, mdp, discount=discount))
    np.testing.assert_allclose(episodes.mean(axis=0), counted, rtol=1e-9)


def test_the_reward_that_is_returned_makes_the_policy_of_the_fit() -> None:
    """What an end pays stands at the actions that lead there: r(s,a) + γ Σ P(s'|s,a) e(s')."""
    rng = np.random.default_rng(3)
    mdp = random_world(rng, num_ends=2)
    reward = pairs_and_ends(rng, mdp, sparse=False)
    irl = MaxCausalEntIRL(discount=0.8)
    fit = irl.fit(mdp, reward, sample_demonstrations(mdp, np.full((6, 3), 1 / 3), num_episodes=50, rng=2))
    plan = soft_policy_iteration(Problem(mdp=mdp, reward=fit.reward, discount=0.8))
    going = ~mdp.terminal
    np.testing.assert_allclose(plan.policy[going], fit.policy[going], atol=1e-9)
    np.testing.assert_allclose(plan.values[going], fit.values[going], rtol=1e-9)
    np.testing.assert_allclose(fit.values[~going], (np.asarray(reward.ends) @ fit.weights)[~going], rtol=1e-9)


def test_a_unit_of_ends_is_a_unit_of_the_column() -> None:
    mdp = random_world(np.random.default_rng(0))
    ends = np.zeros((6, 2))
    ends[5] = [0, 64]
    features = LinearReward(features=np.ones((18, 2)), on="state_action", ends=ends).bound(mdp)
    assert features.units.tolist() == [1, 64]
    assert features.largest == 64


def test_ends_that_fit_nothing_are_refused() -> None:
    mdp, good = random_world(np.random.default_rng(0)), LinearReward(features=np.ones((18, 2)), on="state_action")
    for ends, words in (
        (np.ones((6, 3)), "ends have the shape (6, 3); use (6, 2)"),
        (np.ones(6), "ends have the shape (6,)"),
        (np.full((6, 2), np.nan), "ends: row 0, column 0 is nan"),
    ):
        with refused(words):
            replace(good, ends=ends).bound(mdp)
    with refused("on = 'state' pays for arriving in an end already"):
        LinearReward(features=np.ones((6, 2)), ends=np.ones((6, 2))).bound(mdp)
