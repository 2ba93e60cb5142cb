"""The path model of 2008: what it solves, what it followed, and that its dead ends are errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.irl.divergence import Divergence
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.grids import IcyGridWorld, tiles
from posttrain.irl.maxent import MaxEntIRL, PathDual
from posttrain.irl.paths import path_partition
from posttrain.irl.planning import Problem, soft_policy_iteration
from tests.support.irl_worlds import GOAL, course_demonstrations, random_world, slopes
from tests.support.refusals import refused, warned

ONE_WEIGHT_PER_STATE = LinearReward(features=np.eye(25))


def test_rewards_beyond_all_reason_are_an_error_and_do_not_end_the_process() -> None:
    """Tilted to certainty, a loop that pays is a singular system with empty columns, in which SuperLU can crash."""
    world, rng = IcyGridWorld(5, slip=0.2), np.random.default_rng(0)
    for _ in range(500):
        with refused("partition function over paths is infinite", error=Divergence):
            path_partition(world, rng.normal(size=25) * 10.0 ** rng.uniform(3, 16))


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_the_slopes_of_algorithm_1_are_finite_differences(seed) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=2)
    features = LinearReward(features=np.column_stack([np.ones(6), rng.normal(size=(6, 2))])).bound(mdp)
    dual = PathDual(features, mdp.start, rng.normal(size=3), 0.2)
    weights = np.append(-4.0, rng.normal(size=2) * 0.3)
    true = slopes(lambda w: dual.algorithm1(dual.at(w)), weights).T
    np.testing.assert_allclose(dual.algorithm1_slopes(dual.at(weights)), true, rtol=0, atol=1e-6 * np.abs(true).max())


@pytest.mark.parametrize("l2", [1e-1, 1e-2, 1e-3, 1e-4])
def test_algorithm_1_finds_the_zero_of_its_direction_which_is_not_the_minimum(l2) -> None:
    """Executed, its policy stays .2 away from the demonstrations, however small the penalty: weights grow as 1/l2."""
    world = IcyGridWorld(5, slip=0.2, terminal=[GOAL])
    fit = MaxEntIRL(gradient="algorithm1", l2=l2).fit(world, ONE_WEIGHT_PER_STATE, course_demonstrations())
    assert fit.converged
    assert fit.num_iterations <= 50
    np.testing.assert_allclose(fit.executed - fit.moments, -l2 * fit.weights, rtol=0, atol=1e-8)
    assert fit.executed_gap > 0.2
    assert np.abs(fit.expected - fit.moments + l2 * fit.weights).max() > 0.2  # the gradient of the likelihood there


def test_where_the_way_to_its_zero_is_blocked_a_stronger_penalty_leads_there() -> None:
    """On ice that slips in three of five steps, Newton's method alone creeps along the edge of infinite partitions."""
    world, rng = IcyGridWorld(7, slip=0.6), np.random.default_rng(5)
    policy = soft_policy_iteration(Problem(mdp=world, reward=-1.5 - rng.random(49), discount=1.0)).policy
    walks = sample_demonstrations(world, policy, num_episodes=100, rng=rng)
    fit = MaxEntIRL(gradient="algorithm1").fit(world, LinearReward(features=np.eye(49)), walks)
    assert fit.converged
    np.testing.assert_allclose(fit.executed - fit.moments, -1e-3 * fit.weights, rtol=0, atol=1e-8)


def test_the_unit_of_a_feature_keeps_no_fit_of_paths_from_its_end() -> None:
    world = IcyGridWorld(5, slip=0.2, terminal=[GOAL])
    features = tiles(5, 2) * np.append([1e6, 1e-6], np.ones(8))
    fit = MaxEntIRL().fit(world, LinearReward(features=features), course_demonstrations())
    assert fit.converged
    assert fit.num_iterations < 50


def test_without_a_zero_algorithm_1_soon_ends_and_claims_none() -> None:
    world = IcyGridWorld(5, slip=0.2, terminal=[GOAL])
    with warned("not converged: its largest gradient is 0.2 … use a larger l2"):
        fit = MaxEntIRL(gradient="algorithm1", l2=0.0).fit(world, ONE_WEIGHT_PER_STATE, course_demonstrations())
    assert not fit.converged
    assert fit.num_iterations < 100
