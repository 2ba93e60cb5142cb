"""Gradients and Hessians of every objective are finite differences, wherever features sit and however time runs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.sparse import csr_array, eye_array

from posttrain import irl
from posttrain.irl import curvature, paths
from posttrain.irl.counting import discounted_counts, in_world
from posttrain.irl.feasibility import constant_cost, feasible_start
from posttrain.irl.maxent import PathDual
from posttrain.irl.objectives import Dual, Likelihood, Setting
from posttrain.irl.paths import path_partition
from posttrain.irl.preferences import JointObjective, PreferenceObjective
from tests.support import irl_worlds as worlds
from tests.support.refusals import refused

SEEDS = st.integers(0, 10_000)
PLACES = ["state", "state_action", "next_state", "pairs and ends"]


def setting(rng: np.random.Generator, place: str, discount: float, horizon: int | None, temperature: float) -> Setting:
    mdp = worlds.random_world(rng, num_ends=int(rng.integers(1, 3)))
    made = csr_array if rng.random() < 0.5 else np.asarray
    reward = worlds.features_of(mdp, rng, "state_action" if place == "pairs and ends" else place)
    ends = made(rng.normal(size=(6, 3))) if place == "pairs and ends" else None
    features = replace(reward, features=made(reward.features), ends=ends).bound(mdp)
    time = {"discount": discount, "horizon": horizon}
    return Setting(features=features, start=mdp.start, temperature=temperature, l2=0.3, **time)


def some_weights(rng: np.random.Generator, temperature: float) -> np.ndarray:
    """Costs of 4 τ a step or so: finite values at discount 1 with three actions, whose entropy is at most 1.1 τ."""
    return temperature * np.append(-4.0, rng.normal(size=2) * 0.3)


cases = given(
    seed=SEEDS,
    place=st.sampled_from(PLACES),
    discount=st.sampled_from([0.8, 1.0]),
    horizon=st.sampled_from([None, 1, 5]),
    temperature=st.sampled_from([0.5, 2.0]),
)


@cases
def test_derivatives_of_what_demonstrations_and_preferences_say(seed, place, discount, horizon, temperature) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, place, discount, horizon, temperature)
    counts = rng.random((6, 3) if horizon is None else (horizon, 6, 3))
    counts[..., given_setting.features.mdp.terminal, :] = 0
    differences, weights = 3 * rng.normal(size=(8, 3)), some_weights(rng, temperature)
    dual, preferred = Dual(given_setting, rng.normal(size=3)), PreferenceObjective(given_setting, differences)
    joint = JointObjective(dual, differences, 8)
    for objective in (dual, Likelihood(given_setting, counts), preferred, joint):
        worlds.assert_derivatives(objective, weights)
    parts = dual.at(weights).gradient + preferred.at(weights).gradient - 0.3 * weights  # the penalty counts once
    np.testing.assert_allclose(joint.at(weights).gradient, parts, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(seed=SEEDS)
def test_derivatives_of_the_path_dual(seed) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, "state", 1.0, None, 1.0)
    dual = PathDual(given_setting.features, given_setting.start, rng.normal(size=3), 0.2)
    worlds.assert_derivatives(dual, some_weights(rng, 1.0))


@settings(max_examples=20)
@cases
def test_an_episode_adds_up_to_the_features_of_its_visits(seed, place, discount, horizon, temperature) -> None:
    rng = np.random.default_rng(seed)
    given_setting = setting(rng, place, discount, horizon, temperature)
    plan = given_setting.plan(some_weights(rng, temperature))
    settings_from = [replace(given_setting, start=start) for start in np.eye(6)]
    totals = [each.totals(plan, plan.visits(each.sources())) for each in settings_from]
    expected = curvature.expected_from(plan, given_setting.features)
    np.testing.assert_allclose(expected, totals, rtol=0, atol=1e-10 * np.abs(totals).max())


@pytest.mark.parametrize("horizon", [None, 3])
@pytest.mark.parametrize("place", PLACES)
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
    for grid, same in ((irl.IcyGridWorld(5, slip=0.2), False), (irl.GridWorld(5), True)):
        features = irl.LinearReward(features=np.eye(25)).bound(grid)
        dual = PathDual(features, grid.start, np.zeros(25), 0.0)
        point = dual.at(reward)
        true = worlds.slopes(lambda r, grid=grid: np.array(path_partition(grid, r).values[0]), reward)
        np.testing.assert_allclose(point.gradient, true, rtol=0, atol=1e-8)
        apart = np.abs(dual.algorithm1(point) - true).max()
        assert (apart < 1e-8) if same else (apart > 0.1)


def test_on_dry_ground_algorithm_1_follows_the_gradient_of_any_features() -> None:
    rng, grid = np.random.default_rng(0), irl.GridWorld(4)
    features = irl.LinearReward(features=np.column_stack([np.ones(16), rng.normal(size=(16, 2)) / 10])).bound(grid)
    dual = PathDual(features, grid.start, rng.normal(size=3), 0.2)
    point = dual.at(np.array([-2.0, 0.3, -0.4]))
    np.testing.assert_allclose(dual.algorithm1(point), point.gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("size", [4, 46])
def test_the_first_weights_make_each_step_cost_somewhat_more_than_its_entropy(size, temperature) -> None:
    """Some 2,100 weights are found by another solver than a few."""
    grid = irl.GridWorld(size)
    features = irl.LinearReward(features=eye_array(size**2, format="csr")).bound(grid)
    fitter = irl.MaxCausalEntIRL(discount=1.0, temperature=temperature)
    given_setting = fitter.setting(features, grid.start)
    weights = constant_cost(given_setting)
    np.testing.assert_allclose(weights[:-1], -1.1 * temperature * np.log(4), rtol=1e-9)
    short = irl.LinearReward(features=np.eye(3)).bound(worlds.chain(3, ends=True))
    no_choice = replace(given_setting, features=short, start=np.eye(3)[0])
    assert constant_cost(no_choice)[0] == pytest.approx(-1.1 * temperature * np.log(2)), "as if there were two"


@pytest.mark.parametrize("place", PLACES)
def test_the_start_that_the_library_finds_has_finite_values_at_discount_1(place) -> None:
    given_setting = setting(np.random.default_rng(3), place, 1.0, None, 2.0)
    assert np.isfinite(feasible_start(Dual(given_setting, np.zeros(3))).value)


@pytest.mark.parametrize("discount", [0.8, 1.0])
def test_features_of_states_are_pairs_of_any_action_and_ends(discount) -> None:
    rng = np.random.default_rng(1)
    mdp = worlds.random_world(rng, num_ends=2)
    states = worlds.features_of(mdp, rng)
    both = irl.LinearReward(features=np.repeat(states.features, 3, axis=0), on="state_action", ends=states.features)
    walks, fitter = worlds.aimless(mdp, 50, 2), irl.MaxCausalEntIRL(discount=discount)
    of_states, of_pairs = (fitter.fit(mdp, reward, walks) for reward in (states, both))
    np.testing.assert_allclose(of_pairs.weights, of_states.weights, rtol=1e-6)
    np.testing.assert_allclose(of_pairs.moments, of_states.moments, rtol=1e-12)
    np.testing.assert_allclose(of_pairs.expected, of_states.expected, rtol=1e-9)
    gaps = [irl.smallest_gap(fit.setting, fit.moments) for fit in (of_states, of_pairs)]
    assert gaps[1] == pytest.approx(gaps[0], abs=1e-9)
    known = in_world(walks, mdp)
    episodes = both.bound(mdp).per_episode(known, discount)
    np.testing.assert_allclose(episodes, states.bound(mdp).per_episode(known, discount))
    counted = both.bound(mdp).observed(discounted_counts(known, mdp, discount=discount))
    np.testing.assert_allclose(episodes.mean(axis=0), counted, rtol=1e-9)


def test_the_reward_that_is_returned_makes_the_policy_of_the_fit() -> None:
    """What an end pays stands at the actions that lead there: r(s,a) + γ Σ P(s'|s,a) e(s')."""
    rng = np.random.default_rng(3)
    mdp = worlds.random_world(rng, num_ends=2)
    reward = replace(worlds.features_of(mdp, rng, "state_action"), ends=rng.normal(size=(6, 3)))
    fit = irl.MaxCausalEntIRL(discount=0.8).fit(mdp, reward, worlds.aimless(mdp, 50, 2))
    plan = irl.soft_policy_iteration(irl.Problem(mdp=mdp, reward=fit.reward, discount=0.8))
    going = ~mdp.terminal
    np.testing.assert_allclose(plan.policy[going], fit.policy[going], atol=1e-9)
    np.testing.assert_allclose(plan.values[going], fit.values[going], rtol=1e-9)
    np.testing.assert_allclose(fit.values[~going], (reward.ends @ fit.weights)[~going], rtol=1e-9)


def test_a_unit_of_ends_is_a_unit_of_the_column() -> None:
    ends = np.zeros((6, 2))
    ends[5, 1] = 64
    reward = irl.LinearReward(features=np.ones((18, 2)), on="state_action", ends=ends)
    features = reward.bound(worlds.random_world(np.random.default_rng(0)))
    assert features.units.tolist() == [1, 64]
    assert features.largest == 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ends": np.ones((6, 3))}, "ends have the shape (6, 3); use (6, 2)"),
        ({"ends": np.ones(6)}, "ends have the shape (6,)"),
        ({"ends": np.full((6, 2), np.nan)}, "ends: row 0, column 0 is nan"),
        ({"features": np.ones((6, 2)), "on": "state"}, "on = 'state' pays for arriving in an end already"),
    ],
)
def test_ends_that_fit_nothing_are_refused(given, words) -> None:
    good = irl.LinearReward(features=np.ones((18, 2)), on="state_action", ends=np.ones((6, 2)))
    with refused(words):
        replace(good, **given).bound(worlds.random_world(np.random.default_rng(0)))
