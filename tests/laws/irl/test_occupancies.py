"""How often policies visit states: against dense solves, sums and closed forms, and where that has no finite answer."""

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import irl
from posttrain.irl.comparison import policy_value
from tests.support.irl_worlds import chain, dense_transitions, newest, of_table, random_world
from tests.support.refusals import refused

SEEDS = st.integers(0, 10_000)
few = settings(max_examples=30)
UNIFORM = np.full((9, 4), 0.25)


@few
@given(seed=SEEDS, num_ends=st.integers(1, 3))
def test_undiscounted_occupancies_add_up_to_the_expected_length_and_ends_to_one(seed, num_ends) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=num_ends)
    policy = rng.dirichlet(np.ones(3), 6)
    visits = irl.occupancy(mdp, policy, discount=1.0)
    going = np.einsum("sa,san->sn", policy, dense_transitions(mdp))
    lengths = np.linalg.solve(np.eye(6) - going, np.ones(6))  # states in an episode from each, the last included
    assert visits.sum() == pytest.approx(mdp.start @ lengths, rel=1e-12)
    assert visits[mdp.terminal].sum() == pytest.approx(1, abs=1e-12)
    steps = irl.finite_occupancy(mdp, policy, discount=1.0, horizon=400)
    np.testing.assert_allclose(steps.sum(axis=0), visits, rtol=1e-9)


@few
@given(seed=SEEDS, discount=st.sampled_from([0.3, 0.9]))
def test_discounted_occupancies_of_a_world_without_end_add_up_to_one_over_one_less_discount(seed, discount) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=0)
    visits = irl.occupancy(mdp, rng.dirichlet(np.ones(3), 6), discount=discount)
    assert visits.sum() == pytest.approx(1 / (1 - discount), rel=1e-12)


def test_an_occupancy_that_diverges_is_an_error_naming_the_state() -> None:
    grid = irl.GridWorld(3)
    into_the_wall = np.tile([0.0, 1.0, 0.0, 0.0], (9, 1))
    with refused("from state 0 this policy never ends", error=irl.Divergence):
        irl.occupancy(grid, into_the_wall, discount=1.0)
    assert irl.occupancy(grid, into_the_wall, discount=0.5)[0] == pytest.approx(2)


def test_loops_in_states_that_are_never_visited_do_no_harm() -> None:
    grid = irl.GridWorld(3)
    policy = np.tile([0.0, 1.0, 0.0, 0.0], (9, 1))  # into the wall or back
    policy[[0, 1]], policy[[2, 5]] = [1, 0, 0, 0], [0, 0, 1, 0]  # but for the way 0, 1, 2, 5, 8
    assert irl.occupancy(grid, policy, discount=1.0).tolist() == [1, 1, 1, 0, 0, 1, 0, 0, 1]


def test_an_episode_too_long_to_count_is_an_error() -> None:
    """From state i one goes on with probability p and back with 1 - p: some ((1 - p)/p)^19 visits before the end."""
    table = np.zeros((20, 2, 20))
    table[range(20), 0, [0, *range(19)]] = table[range(20), 1, [*range(1, 20), 19]] = 1
    ladder = of_table(table, ends=[19])
    for up in (0.1, 0.01):  # 10^18 visits and more, where solves gave negative numbers
        with refused("discount 1.0: an episode of this policy visits some state 1e+09", error=irl.Divergence):
            irl.occupancy(ladder, np.tile([1 - up, up], (20, 1)), discount=1.0)
    visits = irl.occupancy(ladder, np.tile([0.6, 0.4], (20, 1)), discount=1.0)
    assert visits[19] == pytest.approx(1, abs=1e-10)
    mdp = of_table(np.array([[[1.0, 1e-17]], [[0.0, 1.0]]]), ends=[1])  # adds up to 1 as it is rounded
    with refused("discount 1.0", error=irl.Divergence):
        irl.occupancy(mdp, np.ones((2, 1)), discount=1.0)


def test_what_a_policy_says_of_terminal_states_changes_nothing() -> None:
    """Shares of actions that were never taken are 0/0."""
    grid, policy = irl.GridWorld(3), UNIFORM.copy()
    policy[8] = np.nan
    for measure in (
        lambda pi: irl.occupancy(grid, pi, discount=1.0),
        lambda pi: irl.finite_occupancy(grid, pi, discount=0.9, horizon=5),
        lambda pi: policy_value(grid, np.arange(9.0), pi, discount=0.9),
        lambda pi: irl.sample_demonstrations(grid, pi, num_episodes=2, rng=np.random.default_rng(0)).states,
    ):
        np.testing.assert_array_equal(measure(policy), measure(UNIFORM))


def test_no_horizon_at_all_leaves_the_start() -> None:
    assert irl.finite_occupancy(chain(3, ends=True), np.ones((3, 1)), discount=0.5, horizon=0).tolist() == [[1, 0, 0]]


def test_states_that_were_left_out_in_reading_keep_their_numbers_in_errors() -> None:
    mdp = irl.read_gymnasium(gymnasium.make(newest("CliffWalking")))  # 38 of 48 states; the last is the goal
    with refused("the reward has nan at (47)"):
        irl.Problem(mdp=mdp, reward=np.where(np.arange(38) == 37, np.nan, 0.0), discount=0.9)
    with refused("the reward has inf at (47, 2)"):
        irl.Problem(mdp=mdp, reward=np.where(np.arange(152).reshape(38, 4) == 150, np.inf, 0.0), discount=0.9)
