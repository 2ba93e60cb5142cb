"""Fits of the path model of 2008."""

import numpy as np
import pytest

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.grids import GridWorld, tiles
from posttrain.irl.maxent import MaxEntIRL
from posttrain.irl.occupancies import occupancy
from posttrain.irl.planning import Problem, soft_policy_iteration
from tests.support.irl_worlds import (
    course_demonstrations,
    course_world,
)
from tests.support.refusals import warned

ONE_WEIGHT_PER_STATE = LinearReward(features=np.eye(25))


def test_the_exact_path_model_matches_its_own_paths_and_not_the_world() -> None:
    """Measured before: own gap .0043, executed gap .423, with l2 = 1e-3."""
    fit = MaxEntIRL(gradient="tilted").fit(course_world(), ONE_WEIGHT_PER_STATE, course_demonstrations())
    assert fit.converged
    assert fit.gap == pytest.approx(0.0043, abs=1e-4)
    assert fit.executed_gap == pytest.approx(0.423, abs=1e-3)
    with warned("not converged"):
        two_steps = MaxEntIRL(max_iterations=2).fit(course_world(), ONE_WEIGHT_PER_STATE, course_demonstrations())
    assert two_steps.num_iterations == 2


def test_algorithm_1_finds_the_zero_of_its_direction_which_is_not_the_minimum() -> None:
    fit = MaxEntIRL(gradient="algorithm1", l2=1e-2).fit(course_world(), ONE_WEIGHT_PER_STATE, course_demonstrations())
    assert fit.converged
    np.testing.assert_allclose(fit.executed - fit.moments, -1e-2 * fit.weights, rtol=0, atol=1e-6)
    assert fit.gap > 0.1


def test_paths_are_fitted_by_fewer_features_than_states() -> None:
    features = tiles(5, 3)
    fit = MaxEntIRL(l2=0.01).fit(course_world(), LinearReward(features=features), course_demonstrations())
    visits = occupancy(course_world(), fit.policy, discount=1.0)
    np.testing.assert_allclose(fit.executed, features.T @ visits, rtol=1e-9)
    np.testing.assert_allclose(fit.expected - fit.moments, -0.01 * fit.weights, rtol=0, atol=1e-7)


def test_on_dry_ground_paths_and_causal_entropy_are_the_same_model() -> None:
    world, expert = GridWorld(4), np.full(16, -2.0)
    expert[5] = -1.5
    policy = soft_policy_iteration(Problem(mdp=world, reward=expert, discount=1.0)).policy
    demonstrations = sample_demonstrations(world, policy, num_episodes=50, rng=np.random.default_rng(0))
    reward = LinearReward(features=np.eye(16))
    paths = MaxEntIRL(l2=0.01).fit(world, reward, demonstrations)
    causal = MaxCausalEntIRL(l2=0.01).fit(world, reward, demonstrations)
    np.testing.assert_allclose(paths.weights, causal.weights, rtol=0, atol=1e-6)
    np.testing.assert_allclose(paths.policy[:15], causal.policy[:15], rtol=0, atol=1e-7)
