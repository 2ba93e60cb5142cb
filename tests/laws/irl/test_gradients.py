"""Gradients and Hessians of every objective equal finite differences, wherever features sit and however time runs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array, eye_array

from posttrain.irl import curvature, paths
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.counting import action_counts, discounted_counts, in_world
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.feasibility import constant_cost, feasible_start, smallest_gap
from posttrain.irl.features import LinearReward
from posttrain.irl.grids import GridWorld, IcyGridWorld
from posttrain.irl.maxent import PathDual
from posttrain.irl.objectives import Dual, Likelihood, Setting
from posttrain.irl.paths import path_partition
from posttrain.irl.planning import Problem, soft_policy_iteration
from tests.support.irl_worlds import chain, random_world, slopes
from tests.support.refusals import refused

SEEDS = st.integers(0, 10_000)
PLACES = st.sampled_from(["state", "state_action", "next_state"])
CLOSE = 1e-6
"""Relative to the largest entry."""


def setting(rng: np.random.Generator, place: str, discount: float, horizon: int | None, temperature: float) -> Setting:
    mdp = random_world(rng, num_ends=int(rng.integers(1, 3)))
    rows = mdp.num_states * (mdp.num_actions if place == "state_action" else 1)
    features = rng.normal(size=(rows, 3))
    features[:, 0] = 1  # so that a step can have a cost
    return Setting(
        features=LinearReward(features=csr_array(features) if rng.random() < 0.5 else features, on=place).bound(mdp),
        start=mdp.start,
        discount=discount,
        temperature=temperature,
        horizon=horizon,
        l2=0.3,
    )


def some_weights(rng: np.random.Generator, temperature: float) -> np.ndarray:
    """Costs of 4 τ a step or so: finite values at discount 1 with three actions, whose entropy is at most 1.1 τ."""
    return temperature * np.append(-4.0, rng.normal(size=2) * 0.3)


def assert_derivatives(objective, weights: np.ndarray) -> None:
    point = objective.at(weights)
    gradient = slopes(lambda w: np.array(objective.at(w).value), weights)
    np.testing.assert_allclose(point.gradient, gradient, rtol=0, atol=CLOSE * np.abs(gradient).max())
    hessian = slopes(lambda w: objective.at(w).gradient, weights)
    np.testing.assert_allclose(point.hessian, hessian, rtol=0, atol=CLOSE * np.abs(hessian).max())


cases = given(
    seed=SEEDS,
    place=PLACES,
    discount=st.sampled_from([0.8, 1.0]),
    horizon=st.sampled_from([None, 1, 5]),
    temperature=st.sampled_from([0.5, 2.0]),
)


@settings(max_examples=60)
@cases
def test_derivatives_of_the_dual(seed, place, discount, horizon, temperature) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, place, discount, horizon, temperature)
    assert_derivatives(Dual(given_setting, rng.normal(size=3)), some_weights(rng, temperature))


@settings(max_examples=60)
@cases
def test_derivatives_of_the_likelihood(seed, place, discount, horizon, temperature) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, place, discount, horizon, temperature)
    mdp = given_setting.features.mdp
    policy = rng.dirichlet(np.ones(mdp.num_actions), mdp.num_states)
    sampled = sample_demonstrations(mdp, policy, num_episodes=5, rng=rng, max_steps=horizon or 50)
    known = in_world(sampled, mdp)
    counts = (
        discounted_counts(known, mdp, discount=1.0).acting
        if horizon is None
        else action_counts(known, mdp, horizon=horizon)
    )
    assert_derivatives(Likelihood(given_setting, counts), some_weights(rng, temperature))


@settings(max_examples=40)
@given(seed=SEEDS)
def test_derivatives_of_the_path_dual(seed) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, "state", 1.0, None, 1.0)
    assert_derivatives(
        PathDual(given_setting.features, given_setting.start, rng.normal(size=3), 0.2), some_weights(rng, 1.0)
    )


@settings(max_examples=40)
@cases
def test_an_episode_adds_up_to_the_features_of_its_visits_wherever_it_starts(
    seed, place, discount, horizon, temperature
) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, place, discount, horizon, temperature)
    plan = given_setting.plan(some_weights(rng, temperature))
    settings_from = [replace(given_setting, start=start) for start in np.eye(6)]
    totals = [each.totals(plan, plan.visits(each.sources())) for each in settings_from]
    np.testing.assert_allclose(
        curvature.expected_from(plan, given_setting.features), totals, rtol=0, atol=1e-10 * np.abs(totals).max()
    )


@pytest.mark.parametrize("horizon", [None, 3])
@pytest.mark.parametrize("place", ["state", "state_action", "next_state"])
def test_a_hessian_that_is_summed_in_blocks_of_a_few_states_is_the_same(place, horizon, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    given_setting, weights = setting(rng, place, 1.0, horizon, 1.0), some_weights(rng, 1.0)
    objectives = [Dual(given_setting, np.zeros(3))]
    if place == "state":
        objectives.append(PathDual(given_setting.features, given_setting.start, np.zeros(3), 0.2))
    whole = [objective.at(weights).hessian for objective in objectives]
    monkeypatch.setattr(curvature, "BLOCK", 4)  # of six states
    monkeypatch.setattr(paths, "BLOCK", 2)
    for objective, hessian in zip(objectives, whole, strict=True):
        np.testing.assert_allclose(objective.at(weights).hessian, hessian, rtol=1e-12, atol=1e-12)


def test_algorithm_1_is_no_gradient_on_ice_and_is_one_on_dry_ground() -> None:
    """Measured before on the course's world: about .56 apart.  With deterministic dynamics the two are the same."""
    reward = -2 + 0.3 * np.random.default_rng(0).normal(size=25)
    for grid, same in ((IcyGridWorld(5, slip=0.2), False), (GridWorld(5), True)):
        features = LinearReward(features=np.eye(25)).bound(grid)
        dual = PathDual(features, grid.start, np.zeros(25), 0.0)
        point = dual.at(reward)
        true = slopes(lambda r, grid=grid: np.array(path_partition(grid, r).values[0]), reward)
        np.testing.assert_allclose(point.gradient, true, rtol=0, atol=1e-8)
        apart = np.abs(dual.algorithm1(point) - true).max()
        assert (apart < 1e-8) if same else (apart > 0.1)


def test_on_dry_ground_algorithm_1_follows_the_gradient_of_any_features() -> None:
    rng, grid = np.random.default_rng(0), GridWorld(4)
    features = LinearReward(features=np.column_stack([np.ones(16), rng.normal(size=(16, 2)) / 10])).bound(grid)
    dual = PathDual(features, grid.start, rng.normal(size=3), 0.2)
    point = dual.at(np.array([-2.0, 0.3, -0.4]))
    np.testing.assert_allclose(dual.algorithm1(point), point.gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("size", [4, 46])
def test_the_first_weights_make_each_step_cost_somewhat_more_than_its_entropy(size, temperature) -> None:
    """Some 2,100 weights are found by another solver than a few."""
    grid = GridWorld(size)
    features = LinearReward(features=eye_array(size**2, format="csr")).bound(grid)
    given_setting = Setting(
        features=features, start=grid.start, discount=1.0, temperature=temperature, horizon=None, l2=0.0
    )
    weights = constant_cost(given_setting)
    np.testing.assert_allclose(weights[:-1], -1.1 * temperature * np.log(4), rtol=1e-9)
    short = LinearReward(features=np.eye(3)).bound(chain(3, ends=True))
    no_choice = replace(given_setting, features=short, start=np.eye(3)[0])
    assert constant_cost(no_choice)[0] == pytest.approx(-1.1 * temperature * np.log(2)), "as if there were two"


@pytest.mark.parametrize("place", ["state", "state_action", "next_state"])
def test_the_start_that_the_library_finds_has_finite_values_at_discount_1(place) -> None:
    rng = np.random.default_rng(3)
    given_setting = setting(rng, place, 1.0, None, 2.0)
    assert np.isfinite(feasible_start(Dual(given_setting, np.zeros(3))).value)


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
