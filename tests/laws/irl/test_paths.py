"""The path model of 2008: what it solves, what it followed, and that its dead ends are errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import irl
from posttrain.irl.maxent import PathDual
from posttrain.irl.paths import path_partition
from tests.support import irl_worlds as worlds
from tests.support.refusals import refused, warned


def test_rewards_beyond_all_reason_are_an_error_and_do_not_end_the_process() -> None:
    """Tilted to certainty, a loop that pays is a singular system with empty columns, in which SuperLU can crash."""
    world, rng = irl.IcyGridWorld(5, slip=0.2), np.random.default_rng(0)
    for _ in range(500):
        with refused("partition function over paths is infinite", error=irl.Divergence):
            path_partition(world, rng.normal(size=25) * 10.0 ** rng.uniform(3, 16))


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_the_slopes_of_algorithm_1_are_finite_differences(seed) -> None:
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng, num_ends=2)
    dual = PathDual(worlds.features_of(mdp, rng).bound(mdp), mdp.start, rng.normal(size=3), 0.2)
    weights = np.append(-4.0, rng.normal(size=2) * 0.3)
    true = worlds.slopes(lambda w: dual.algorithm1(dual.at(w)), weights).T
    np.testing.assert_allclose(dual.algorithm1_slopes(dual.at(weights)), true, rtol=0, atol=1e-6 * np.abs(true).max())


def test_the_exact_path_model_matches_its_own_paths_and_not_the_world() -> None:
    """Measured before: own gap .0043, executed gap .423, with l2 = 1e-3."""
    fit = worlds.fit_course(irl.MaxEntIRL(gradient="tilted"))
    assert fit.converged
    assert fit.gap == pytest.approx(0.0043, abs=1e-4)
    assert fit.executed_gap == pytest.approx(0.423, abs=1e-3)
    with warned("not converged"):
        assert worlds.fit_course(irl.MaxEntIRL(max_iterations=2)).num_iterations == 2


@pytest.mark.parametrize("l2", [1e-1, 1e-2, 1e-3, 1e-4])
def test_algorithm_1_finds_the_zero_of_its_direction_which_is_not_the_minimum(l2) -> None:
    """Executed, its policy stays .2 away from the demonstrations, however small the penalty: weights grow as 1/l2."""
    fit = worlds.fit_course(irl.MaxEntIRL(gradient="algorithm1", l2=l2))
    assert fit.converged
    assert fit.num_iterations <= 50
    np.testing.assert_allclose(fit.executed - fit.moments, -l2 * fit.weights, rtol=0, atol=1e-8)
    assert fit.executed_gap > 0.2
    assert np.abs(fit.expected - fit.moments + l2 * fit.weights).max() > 0.2  # the gradient of the likelihood there


def test_where_the_way_to_its_zero_is_blocked_a_stronger_penalty_leads_there() -> None:
    """On ice that slips in three of five steps, Newton's method alone creeps along the edge of infinite partitions."""
    world, rng = irl.IcyGridWorld(7, slip=0.6), np.random.default_rng(5)
    policy = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=-1.5 - rng.random(49), discount=1.0)).policy
    walks = irl.sample_demonstrations(world, policy, num_episodes=100, rng=rng)
    fit = irl.MaxEntIRL(gradient="algorithm1").fit(world, irl.LinearReward(features=np.eye(49)), walks)
    assert fit.converged
    np.testing.assert_allclose(fit.executed - fit.moments, -1e-3 * fit.weights, rtol=0, atol=1e-8)


def test_paths_are_fitted_by_fewer_features_than_states() -> None:
    features = irl.tiles(5, 3)
    fit = worlds.fit_course(irl.MaxEntIRL(l2=0.01), irl.LinearReward(features=features))
    visits = irl.occupancy(worlds.course_world(), fit.policy, discount=1.0)
    np.testing.assert_allclose(fit.executed, features.T @ visits, rtol=1e-9)
    np.testing.assert_allclose(fit.expected - fit.moments, -0.01 * fit.weights, rtol=0, atol=1e-7)


def test_the_unit_of_a_feature_keeps_no_fit_of_paths_from_its_end() -> None:
    features = irl.tiles(5, 2) * np.append([1e6, 1e-6], np.ones(8))
    fit = worlds.fit_course(irl.MaxEntIRL(), irl.LinearReward(features=features))
    assert fit.converged
    assert fit.num_iterations < 50


def test_without_a_zero_algorithm_1_soon_ends_and_claims_none() -> None:
    with warned("not converged: its largest gradient is 0.2 … use a larger l2"):
        fit = worlds.fit_course(irl.MaxEntIRL(gradient="algorithm1", l2=0.0))
    assert not fit.converged
    assert fit.num_iterations < 100


def test_on_dry_ground_paths_and_causal_entropy_are_the_same_model() -> None:
    world, expert = irl.GridWorld(4), np.full(16, -2.0)
    expert[5] = -1.5
    policy = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=expert, discount=1.0)).policy
    shown = irl.sample_demonstrations(world, policy, num_episodes=50, rng=np.random.default_rng(0))
    reward = irl.LinearReward(features=np.eye(16))
    paths, causal = (fitter(l2=0.01).fit(world, reward, shown) for fitter in (irl.MaxEntIRL, irl.MaxCausalEntIRL))
    np.testing.assert_allclose(paths.weights, causal.weights, rtol=0, atol=1e-6)
    np.testing.assert_allclose(paths.policy[:15], causal.policy[:15], rtol=0, atol=1e-7)
