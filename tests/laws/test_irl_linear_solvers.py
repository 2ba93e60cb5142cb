"""Linear systems of policies: by iteration as by factors, near singular too, and which worlds are wide."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from posttrain.irl import linear_solvers
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.divergence import Divergence
from posttrain.irl.grids import IcyGridWorld, tiles
from posttrain.irl.linear_solvers import Iterated, factorised, width
from posttrain.irl.linear_systems import system
from posttrain.irl.maxent import MaxEntIRL
from posttrain.irl.mdp import TabularMDP, state_graph
from posttrain.irl.planning import Problem, soft_policy_iteration
from posttrain.irl.rewards import LinearReward
from posttrain.irl.sampling import sample_demonstrations
from tests.irl_worlds import random_world


def anywhere(num_states: int, *, num_actions: int = 2, end: float = 0.01) -> TabularMDP:
    """Each action leads to three states that lie anywhere, or with the probability `end` to the last, which ends."""
    rng, pairs = np.random.default_rng(0), num_states * num_actions
    shares = np.column_stack([rng.dirichlet(np.ones(3), pairs) * (1 - end), np.full(pairs, end)])
    following = np.column_stack([rng.integers(0, num_states - 1, (pairs, 3)), np.full(pairs, num_states - 1)])
    table = csr_array((shares.ravel(), (np.repeat(np.arange(pairs), 4), following.ravel())), shape=(pairs, num_states))
    return TabularMDP.from_sparse(table, num_actions=num_actions, start=0, terminal=[num_states - 1])


def uniform(world: TabularMDP) -> np.ndarray:
    return np.full((world.num_states, world.num_actions), 1 / world.num_actions)


@pytest.mark.parametrize("discount", [0.0, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("direction", ["N", "T"])
def test_iterations_solve_what_factors_solve(discount, direction) -> None:
    world = anywhere(900)
    wide = system(world, uniform(world), discount)
    assert isinstance(wide, Iterated)
    right = np.random.default_rng(1).normal(size=(900, 3)) * [1.0, 1e-200, 1e200]
    right[:, 0] *= np.arange(900) % 7 == 0
    solved, exact = wide.solve(right, direction), factorised(wide.matrix).solve(right, direction)
    np.testing.assert_allclose(solved / np.abs(exact).max(axis=0), exact / np.abs(exact).max(axis=0), atol=1e-10)
    np.testing.assert_array_equal(wide.solve(right[:, 0], direction), solved[:, 0])
    np.testing.assert_array_equal(wide.solve(np.zeros(900), direction), np.zeros(900))
    assert "factors" not in vars(wide), "which were never needed"


def test_what_no_iteration_settles_is_factorised_or_said_to_diverge(monkeypatch) -> None:
    """Episodes of 10¹⁰ steps on a ring: I - P is as good as singular."""
    size = 400
    steps = csr_array((np.full(size, 1.0), (range(size), [*range(1, size), 0])), shape=(size, size))
    matrix = (csr_array(np.eye(size)) - (1 - 1e-10) * steps).tocsc()
    exact = factorised(matrix).solve(np.ones(size))
    np.testing.assert_allclose(exact, 1e10, rtol=1e-4)
    monkeypatch.setattr(linear_solvers, "MAX_ITERATIONS", 20)
    right = np.random.default_rng(0).normal(size=size)
    np.testing.assert_array_equal(Iterated(matrix).solve(right), factorised(matrix).solve(right))
    monkeypatch.setattr(linear_solvers, "LARGEST_FACTORED", size - 1)
    with pytest.raises(Divergence, match="400 states is too near to singular for iterations: episodes hardly ever end"):
        Iterated(matrix).solve(right)


def test_a_policy_that_never_ends_diverges_in_a_wide_world_too() -> None:
    """Rewards of 1 a step at discount 1, where an action may be chosen that ends an episode once in 10¹³ steps."""
    world = anywhere(900, end=1e-13)
    with pytest.raises(Divergence, match="discount 1"):
        soft_policy_iteration(Problem(mdp=world, reward=np.ones(900), discount=1.0))


def test_flat_worlds_are_narrow_and_others_wide() -> None:
    assert 30 <= width(state_graph(IcyGridWorld(30))) <= 60
    assert not IcyGridWorld(30).wide
    assert not IcyGridWorld(320).wide, "a square is what factors are for, however large"
    assert anywhere(900).wide
    assert not random_world(np.random.default_rng(0), num_states=40).wide, "small"


def test_a_state_to_which_all_return_separates_nothing() -> None:
    """Every step may end at once, or lead back to the start: the grid below is as flat as it was."""
    grid, pairs = IcyGridWorld(40, terminal=()), np.arange(6400)
    places = (np.tile(pairs, 2), np.repeat([0, 1599], 6400))
    table = 0.9 * grid.transitions + csr_array((np.full(12800, 0.05), places), shape=(6400, 1600))
    hubs = TabularMDP.from_sparse(table, num_actions=4, start=0, terminal=[1599])
    assert width(state_graph(hubs)) <= 80
    assert not hubs.wide


@pytest.mark.parametrize("irl", [MaxCausalEntIRL(), MaxCausalEntIRL(discount=0.9, solver="lbfgs"), MaxEntIRL()])
def test_a_fit_is_the_same_by_iteration(irl, monkeypatch) -> None:
    world, reward = IcyGridWorld(12), LinearReward(features=tiles(12, 4))
    shown = sample_demonstrations(world, uniform(world), num_episodes=20, rng=np.random.default_rng(0))
    exact = irl.fit(world, reward, shown)
    monkeypatch.setattr(linear_solvers, "NARROW", 5)
    monkeypatch.setattr(linear_solvers, "FLAT", 0.5)
    thick = IcyGridWorld(12)
    assert thick.wide
    found = irl.fit(thick, reward, shown)
    np.testing.assert_allclose(found.weights, exact.weights, atol=1e-6)
    np.testing.assert_allclose(found.policy, exact.policy, atol=1e-8)
