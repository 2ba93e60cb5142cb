"""Worlds read from tables, dense arrays, grids and gymnasium, and what is refused, naming the row."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from scipy.sparse import bsr_array, coo_array, csc_array, csr_array, csr_matrix, dia_array, dok_array, lil_array

from posttrain.irl.grids import GridWorld, IcyGridWorld, tiles
from posttrain.irl.gymnasium_table import read_gymnasium
from posttrain.irl.mdp import TabularMDP
from tests.support.irl_worlds import dense_transitions, newest
from tests.support.refusals import refused

# Two states and an end; action 0 goes on, action 1 stays with probability .7 (state 0) or ends.
TABLE = np.array(
    [[[0.0, 1.0, 0.0], [0.7, 0.0, 0.3]], [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]]
)


def world(table: np.ndarray = TABLE, **given) -> TabularMDP:
    return TabularMDP.from_dense(table, **({"layout": "state action next", "start": 0, "terminal": [2]} | given))


def test_dense_sparse_and_swapped_arrays_make_the_same_world() -> None:
    expected = TABLE.copy()
    expected[2] = 0  # nothing leads out of a terminal state
    swapped = world(TABLE.transpose(0, 2, 1), layout="state next action")
    for kind in (csr_array, csr_matrix, csc_array, coo_array, lil_array, dok_array, bsr_array, dia_array):
        sparse = TabularMDP.from_sparse(kind(TABLE.reshape(6, 3)), num_actions=2, start=0, terminal=[2])
        np.testing.assert_array_equal(dense_transitions(sparse), expected)
    for mdp in (world(), world(terminal=np.array([2])), swapped):
        np.testing.assert_array_equal(dense_transitions(mdp), expected)
        assert mdp.terminal.tolist() == [False, False, True]
        assert mdp.start.tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_the_callers_matrix_is_left_as_it_was(dtype) -> None:
    table = TABLE.reshape(6, 3).round().astype(dtype)  # certain steps, in numbers that are copied on conversion or not
    table[2] = table[0]
    given = csr_array(table)
    mdp = TabularMDP.from_sparse(given, num_actions=2, start=0, terminal=[2])
    np.testing.assert_array_equal(given.toarray(), table)
    np.testing.assert_array_equal(mdp.transitions.toarray()[:4], table[:4])


def test_entries_for_the_same_transition_add_up() -> None:
    table = csr_array(([0.7, 0.5, -0.2, 1.0], [0, 1, 0, 1], [0, 3, 4]), shape=(2, 2))
    mdp = TabularMDP.from_sparse(table, num_actions=1, start=0, terminal=[1])
    np.testing.assert_allclose(mdp.transitions.data, [0.5, 0.5], rtol=1e-15)
    assert np.all(mdp.rewards == 0), "a table names none"


def test_an_icy_step_goes_where_it_was_meant_to_with_what_the_slips_leave() -> None:
    table = dense_transitions(IcyGridWorld(3, slip=0.2, terminal=()))
    # From the middle, state 4, action 0 moves +x to 5: .8 + .05; each other neighbour (3, 7, 1) gets .05.
    # From the corner 0, action 1 (-x) stays by intent, and so does a slip to -y: .85 + .05; +x and +y get .05.
    # Action 2 (+y) from 2, at the right edge: 5 by intent; slips stay (+x, -y) or go to 1.
    for state, action, expected in (
        (4, 0, {1: 0.05, 3: 0.05, 5: 0.85, 7: 0.05}),
        (0, 1, {0: 0.9, 1: 0.05, 3: 0.05}),
        (2, 2, {1: 0.05, 2: 0.1, 5: 0.85}),
    ):
        row = table[state, action]
        assert {int(each): round(row[each], 12) for each in np.flatnonzero(row)} == expected


def test_a_dry_grid_goes_where_it_was_meant_to_and_ends_in_its_last_corner() -> None:
    grid = GridWorld(4)
    table = dense_transitions(grid)
    assert table[5, 3, 1] == table[5, 2, 9] == table[5, 1, 4] == table[5, 0, 6] == 1
    assert np.flatnonzero(grid.terminal).tolist() == [15]
    assert table[15].sum() == 0


def test_a_grid_of_one_state_stays_where_it_is() -> None:
    grid = IcyGridWorld(1, slip=0.3, terminal=())
    np.testing.assert_allclose(dense_transitions(grid), np.ones((1, 4, 1)), rtol=1e-15)
    assert (grid.size, grid.slip) == (1, 0.3)
    assert np.all(grid.rewards == 0), "it names none"


def test_any_state_may_be_the_end_the_first_too() -> None:
    assert np.flatnonzero(GridWorld(3, start=8, terminal=[0]).terminal).tolist() == [0]


def test_tiles_cover_each_state_once_beside_a_constant() -> None:
    features = tiles(5, 2)
    assert features.shape == (25, 10)
    assert np.all(features[:, 0] == 1)
    assert np.all(features[:, 1:].sum(axis=1) == 1)
    # Columns 1-3 are the tiles of rows y = 0, 1: x = 0-1, 2-3, 4.
    assert np.flatnonzero(features[:, 3]).tolist() == [4, 9]
    assert tiles(2, 1).tolist() == [[1, *row] for row in np.eye(4)]


@pytest.mark.parametrize(
    ("name", "options", "num_states", "num_ends", "start"),
    [
        ("FrozenLake", {"map_name": "4x4"}, 16, 5, [0]),  # 4 holes and the goal
        ("FrozenLake", {"map_name": "8x8"}, 64, 11, [0]),  # 10 holes and the goal
        ("CliffWalking", {}, 38, 1, [36]),  # 48 - 10 cliff states, which throw back to the start
    ],
)
def test_a_table_of_gymnasium_is_read_with_its_ends(name, options, num_states, num_ends, start) -> None:
    mdp = read_gymnasium(gymnasium.make(newest(name), **options))
    assert mdp.num_states == num_states
    assert mdp.terminal.sum() == num_ends
    assert mdp.states[mdp.start > 0].tolist() == start


def test_taxi_loses_the_states_that_no_start_reaches_and_ends_on_delivery() -> None:
    env = gymnasium.make(newest("Taxi"))
    mdp = read_gymnasium(env)
    # 25 places × 4 destinations × (4 waiting + 1 riding) = 500, less the 4 × 25 where one waits at the destination,
    # of which delivery reaches the 4 with the taxi there too.
    assert mdp.num_states == 404
    assert mdp.terminal.sum() == 4
    for row in range(5 * 6, 8 * 6):
        state, action = divmod(row, 6)
        outcomes = env.unwrapped.P[int(mdp.states[state])][action]
        assert mdp.rewards[state, action] == sum(p * r for p, _, r, _ in outcomes)
        for probability, following, _, _ in outcomes:
            assert mdp.transitions[row, mdp.numbers[following]] == probability


class Table:
    """An environment with no more than a table: 0 leads to 1 and 2; 1 leads to 2, which is an end only for 0."""

    def __init__(self, *, end_from_1: bool) -> None:
        self.P = {0: {0: [(0.5, 1, 0.0, False), (0.5, 2, 1.0, True)]}, 1: {0: [(1.0, 2, 0.0, end_from_1)]}}
        self.P[2] = {0: [(1.0, 2, 0.0, False)]}
        self.initial_state_distrib = np.array([1.0, 0.0, 0.0])


def test_an_end_that_is_not_a_property_of_the_state_is_refused() -> None:
    assert read_gymnasium(Table(end_from_1=True)).terminal.tolist() == [False, False, True]
    with refused("state 2 ends the episode when entered from state 0 by action 0, and does not"):
        read_gymnasium(Table(end_from_1=False))


def test_an_environment_whose_dynamics_are_not_in_its_table_is_refused() -> None:
    for env in (gymnasium.make("CartPole-v1"), SimpleNamespace(P=Table(end_from_1=True).P)):
        with refused("no transition table"):
            read_gymnasium(env)
    if "Taxi-v4" in gymnasium.registry:
        with refused("fickle"):
            read_gymnasium(gymnasium.make("Taxi-v4", fickle_passenger=True))


class Listed:
    """State 0 goes on to 1 or stays, 1 ends in 2 or goes back; `changes` replace what some pairs list."""

    def __init__(self, *, start: object = (1.0, 0.0, 0.0), **changes: object) -> None:
        self.P: dict[int, dict[object, object]] = {
            0: {0: [(1.0, 1, -1.0, False)], 1: [(1.0, 0, -1.0, False)]},
            1: {0: [(1.0, 2, 5.0, True)], 1: [(1.0, 0, -1.0, False)]},
        }
        for pair, outcomes in changes.items():
            state, action = pair.removeprefix("p").split("_")
            self.P[int(state)][int(action)] = outcomes
        self.initial_state_distrib = start


def test_a_table_of_lists_reads_as_one_of_dictionaries_does() -> None:
    expected, listed = Listed(), Listed(p0_1=[(0.0, 99, 0.0, False), (0.25, 0, -1.0, False), (0.75, 0, -1.0, False)])
    listed.P = [list(actions.values()) for actions in listed.P.values()]
    worlds = [read_gymnasium(env) for env in (expected, listed)]
    for mdp in worlds:
        assert mdp.transitions.toarray().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
        assert mdp.rewards.tolist() == [[-1, -1], [5, -1], [0, 0]]
        assert mdp.terminal.tolist() == [False, False, True]


def without_action(state: int, action: int) -> Listed:
    env = Listed()
    del env.P[state][action]
    return env


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (without_action(0, 1), "P[1] has the actions 0, 1, not 0 to 0"),
        (without_action(1, 1), "P[1] has the actions 0, not 0 to 1"),
        (without_action(0, 0), "P[0] has the actions 1, not 0 to 0"),
        (Listed(p1_2=[(1.0, 0, 0.0, False)]), "P[1] has the actions 0, 1, 2, not 0 to 1"),
        (Listed(p0_0=[(1.0, 3, 0.0, False)]), "P[0][0] leads to state 3; states are 0 to 2"),
        (Listed(p0_0=[(1.0, -1, 0.0, True)]), "P[0][0] leads to state -1"),
        (Listed(p0_0=[(1.0, 2, 0.0, False)]), "state 2 is entered from state 0 by action 0, and P lists no actions"),
        (Listed(p0_0=[(1.0, 1.5, 0.0, False)]), "P[0][0] lists (1.0, 1.5, 0.0, False): give"),
        (Listed(p0_0=[(1.0, 1, 0.0)]), "P[0][0] lists (1.0, 1, 0.0): give (probability"),
        (Listed(p0_0=[(1.0, 1, 0.0, None)]), "P[0][0] lists … None): give"),
        (Listed(p0_0=None), "P[0][0] is None: give a list of outcomes"),
        (Listed(p0_0=[(1.5, 1, 0.0, False), (-0.5, 1, 0.0, False)]), r"leads to state 1 with probability 1.5"),
        (Listed(p0_0=[(np.nan, 1, 0.0, False)]), r"leads to state 1 with probability nan"),
        (Listed(p0_0=[(1.0, 1, np.nan, False)]), "P[0][0] pays nan on leading to state 1"),
        (Listed(p0_0=[]), "state 0, action 0 … add up to 0, not to 1"),
        (Listed(p0_0=[(np.float32(1 / 3), 1, 0.0, False)] * 3), "add up to 1.00000003, not to 1 … by their sum"),
        (Listed(start=(0.0, 0.0, 0.0)), "start: the probabilities add up to 0, not to 1"),
        (Listed(start=0), "Listed: `initial_state_distrib` has the shape ()"),
        (Listed(start=(0.5, 0.0, 0.5)), "state 2 is entered at the start, and P lists no actions there"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_naming_the_entry(env, message) -> None:
    with refused(message):
        read_gymnasium(env)


def changed(row: tuple[int, int], values: list[float]) -> np.ndarray:
    table = TABLE.copy()
    table[row] = values
    return table


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: world(changed((1, 0), [0.5, 0.4, 0.0])), "state 1, action 0 (row 2) … add up to 0.9, not to 1"),
        (lambda: world(changed((0, 1), [1.2, -0.2, 0.0])), "state 0, action 1 (row 1) to state 1 … -0.2"),
        (lambda: world(changed((1, 1), [np.nan, 0.5, 0.5])), "state 1, action 1 (row 3) to state 0 … nan"),
        (lambda: world(start=[0.5, 0.4, 0.0]), "start: the probabilities add up to 0.9"),
        (lambda: world(start=[1.5, -0.5, 0.0]), "start: state 1 has probability -0.5"),
        (lambda: world(start=[1.0, 0.0]), "start has the shape (2,)"),
        (lambda: world(start=3), "start state 3 does not exist: states are 0 to 2"),
        (lambda: world(terminal=[7]), "terminal state 7 does not exist"),
        (lambda: world(terminal=[False, True]), "terminal has 2 flags: give one for each of 3 states"),
        (lambda: world(np.full((3, 2, 3), 1 / 3, np.float32)), "add up to 1.00000003,"),
        (lambda: world(changed((1, 1), [1, 0, 0]), terminal=[1, 2], start=1), "terminal state 2 cannot be reached"),
        (lambda: world(TABLE[:2]), "shape (2, 2, 3), which is not (state action next)"),
        (lambda: world(layout="next state action"), "layout = 'next state action'"),
        (lambda: TabularMDP.from_sparse(csr_array(TABLE[0]), num_actions=2, start=0), "2 rows and 3 columns"),
        (lambda: IcyGridWorld(5, slip=1.2), "slip = 1.2"),
        (lambda: IcyGridWorld(0), "size = 0"),
        (lambda: tiles(5, 6), "width = 6"),
    ],
)
def test_what_is_no_world_is_refused_naming_the_row(make, message) -> None:
    with refused(message):
        make()
