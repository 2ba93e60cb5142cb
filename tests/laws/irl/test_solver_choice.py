"""Both solvers match what can be matched; and moments that no policy has are told, whatever the penalty."""

import gymnasium
import numpy as np
import pytest

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.features import LinearReward
from posttrain.irl.grids import GridWorld, IcyGridWorld
from posttrain.irl.gymnasium_table import read_gymnasium
from posttrain.irl.mdp import TabularMDP
from tests.support.irl_worlds import newest
from tests.support.refusals import warned


def moments_of(irl: MaxCausalEntIRL, mdp: TabularMDP, reward: LinearReward, weights: np.ndarray):
    """Exact features of the soft-optimal policy of some weights, and that policy."""
    given_setting = irl.setting(reward.bound(mdp), mdp.start)
    plan = given_setting.plan(weights)
    return given_setting.totals(plan, plan.visits(given_setting.sources())), plan.policy


@pytest.mark.parametrize("seed", [2, 3])
def test_lbfgs_matches_exact_moments_of_a_lake_whose_weights_count_unequally(seed) -> None:
    """At discount .99 a state by the way counts a thousand times one beyond the holes."""
    mdp = read_gymnasium(gymnasium.make(newest("FrozenLake"), map_name="8x8"))
    reward, irl = LinearReward(features=np.eye(64)), MaxCausalEntIRL(discount=0.99, l2=0.0, solver="lbfgs")
    moments, _ = moments_of(irl, mdp, reward, np.random.default_rng(seed).normal(size=64))
    fit = irl.fit_moments(mdp, reward, moments)
    assert fit.converged
    assert fit.gap + fit.gap_error <= 1e-7


def test_of_many_weights_a_fit_takes_no_second_derivatives() -> None:
    """Some 600 of them: one Hessian costs what a hundred gradients do."""
    grid = IcyGridWorld(25)
    reward, evaluations = LinearReward(features=np.eye(625)), []
    irl = MaxCausalEntIRL(discount=0.9, l2=1e-2)
    moments, _ = moments_of(irl, grid, reward, np.random.default_rng(0).normal(size=625))
    fit = irl.fit_moments(grid, reward, moments, watch=evaluations.append)
    assert fit.converged
    assert len(evaluations) > 30, "Newton's method takes about ten"


@pytest.mark.parametrize("horizon", [None, 20])
def test_moments_that_no_policy_has_are_told_with_a_penalty_too(horizon) -> None:
    """Episodes of the grid take 4 steps at least, and 250 visits of the start are more than any has by choice."""
    reward, moments = LinearReward(features=np.eye(9)), np.zeros(9)
    moments[8] = 250.0
    irl = MaxCausalEntIRL(discount=0.9, horizon=horizon)
    with warned("no policy has these moments: the gap is 2"):
        irl.fit_moments(GridWorld(3), reward, moments)


@pytest.mark.filterwarnings("error")
def test_a_gap_that_is_the_penaltys_is_no_reason_to_warn() -> None:
    reward, grid = LinearReward(features=np.eye(9)), GridWorld(3)
    moments, _ = moments_of(MaxCausalEntIRL(discount=0.9), grid, reward, 2 * np.random.default_rng(0).normal(size=9))
    fit = MaxCausalEntIRL(discount=0.9, l2=1.0).fit_moments(grid, reward, moments)
    assert fit.gap > 0.01 * np.abs(moments).max()
