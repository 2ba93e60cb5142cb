"""Linear systems of policies, by iteration as by factors, near singular too; and how often policies visit states."""

import gymnasium
import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.sparse import csr_array

from posttrain import irl
from posttrain.irl import linear_solvers
from posttrain.irl.comparison import policy_value
from posttrain.irl.linear_solvers import IterativeSolver, lu_factors, width
from posttrain.irl.linear_systems import policy_system
from posttrain.irl.mdp import state_graph
from posttrain.irl.paths import path_partition
from tests.support.irl_worlds import aimless, chain, dense_transitions, newest, of_table, random_world, uniform_policy
from tests.support.refusals import refused


def leading(columns: np.ndarray, num_actions: int, *, shares: np.ndarray | None = None, ends: bool) -> irl.TabularMDP:
    """Each pair of state and action leads to each state of its row, as often unless `shares` say how often."""
    pairs, ways = columns.shape
    shares = np.full(columns.shape, 1 / ways) if shares is None else shares
    places, num_states = (np.repeat(np.arange(pairs), ways), columns.ravel()), pairs // num_actions
    table = csr_array((shares.ravel(), places), shape=(pairs, num_states))
    last = [num_states - 1] if ends else []
    return irl.TabularMDP.from_sparse(table, num_actions=num_actions, start=0, terminal=last)


def anywhere(num_states: int, *, num_actions: int = 2, end: float = 0.01) -> irl.TabularMDP:
    """Each action leads to three states that lie anywhere, or with the probability `end` to the last, which ends."""
    rng, pairs = np.random.default_rng(0), num_states * num_actions
    shares = np.column_stack([rng.dirichlet(np.ones(3), pairs) * (1 - end), np.full(pairs, end)])
    columns = np.column_stack([rng.integers(0, num_states - 1, (pairs, 3)), np.full(pairs, num_states - 1)])
    return leading(columns, num_actions, shares=shares, ends=True)


@pytest.mark.parametrize("discount", [0.0, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("direction", ["N", "T"])
def test_iterations_solve_what_factors_solve(discount, direction) -> None:
    world = anywhere(900)
    wide = policy_system(world, uniform_policy(world), discount)
    assert isinstance(wide, IterativeSolver)
    right = np.random.default_rng(1).normal(size=(900, 3)) * [1.0, 1e-200, 1e200]
    right[:, 0] *= np.arange(900) % 7 == 0
    solved, exact = wide.solve(right, direction), lu_factors(wide.matrix).solve(right, direction)
    np.testing.assert_allclose(solved / np.abs(exact).max(axis=0), exact / np.abs(exact).max(axis=0), atol=1e-10)
    np.testing.assert_array_equal(wide.solve(right[:, 0], direction), solved[:, 0])
    np.testing.assert_array_equal(wide.solve(np.zeros(900), direction), np.zeros(900))
    assert "factors" not in vars(wide), "which were never needed"


def test_what_no_iteration_settles_is_factorised_or_said_to_diverge(monkeypatch) -> None:
    """Episodes of 10¹⁰ steps on a ring: I - P is as good as singular."""
    size = 400
    steps = csr_array((np.full(size, 1.0), (range(size), [*range(1, size), 0])), shape=(size, size))
    matrix = (csr_array(np.eye(size)) - (1 - 1e-10) * steps).tocsc()
    exact = lu_factors(matrix).solve(np.ones(size))
    np.testing.assert_allclose(exact, 1e10, rtol=1e-4)
    monkeypatch.setattr(linear_solvers, "MAX_ITERATIONS", 2)
    right = np.random.default_rng(0).normal(size=size)
    np.testing.assert_array_equal(IterativeSolver(matrix).solve(right), lu_factors(matrix).solve(right))
    monkeypatch.setattr(linear_solvers, "LARGEST_FACTORED", size - 1)
    # A ring is narrow.
    np.testing.assert_array_equal(IterativeSolver(matrix).solve(right), lu_factors(matrix).solve(right))
    world = anywhere(900, end=1e-6)
    wide = policy_system(world, uniform_policy(world), 1.0)
    with refused("900 states did not settle in 6 times 2 iterations, and its factors would", error=irl.Divergence):
        wide.solve(np.ones(900))


def tree(depth: int) -> irl.TabularMDP:
    """Two actions, each to a child of its own; leaves lead to the end."""
    children = np.arange(2 ** (depth + 2))[:, None] + 1
    end = 2 ** (depth + 1) - 1
    return leading(np.where(children < end, children, end), 2, ends=True)


def dry_cube(side: int) -> irl.TabularMDP:
    """Three dimensions, in each of which an action leads on; the last corner ends."""
    places = np.array(np.unravel_index(np.arange(side**3), (side,) * 3))
    beside = [np.minimum(places + np.eye(3, dtype=int)[:, [axis]], side - 1) for axis in range(3)]
    columns = np.stack([np.ravel_multi_index(tuple(there), (side,) * 3) for there in beside], axis=1)
    return leading(columns.reshape(-1, 1), 3, ends=True)


def ring(size: int) -> irl.TabularMDP:
    """One action leads round and round, the other anywhere."""
    columns = np.column_stack([(np.arange(size) + 1) % size, np.random.default_rng(0).integers(0, size, size)])
    return leading(columns.reshape(-1, 1), 2, ends=False)


@pytest.mark.parametrize(("make", "discount"), [(lambda: tree(10), 1.0), (lambda: dry_cube(13), 1.0),
                                                (lambda: dry_cube(13), 0.99), (lambda: ring(900), 0.999)])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.01, 0.1])
def test_policies_that_are_all_but_certain_are_solved_from_one_state(make, discount, temperature, monkeypatch) -> None:
    """Of an episode that goes a certain way nothing is left over where it began: BiCGSTAB alone breaks down."""
    monkeypatch.setattr(linear_solvers, "LARGEST_FACTORED", 10)
    monkeypatch.setattr(linear_solvers, "NARROW", 100)
    world = make()
    assert world.wide
    reward = -1 - np.random.default_rng(1).random(world.num_states)
    plan = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=reward, discount=discount, temperature=temperature))
    best = np.eye(world.num_actions)[plan.policy.argmax(axis=1)]
    for policy in (plan.policy, best):
        exact = lu_factors(policy_system(world, policy, discount).matrix)
        for right, direction in ((world.start, "T"), (reward, "N")):
            expected = exact.solve(right, direction)
            found = policy_system(world, policy, discount).solve(right, direction)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_a_policy_that_never_ends_diverges_in_a_wide_world_too() -> None:
    """Rewards of 1 a step at discount 1, where an action may be chosen that ends an episode once in 10¹³ steps."""
    world = anywhere(900, end=1e-13)
    with refused("almost never end", error=irl.Divergence):
        irl.soft_policy_iteration(irl.Problem(mdp=world, reward=np.ones(900), discount=1.0))


def test_flat_worlds_are_narrow_and_others_wide() -> None:
    assert 30 <= width(state_graph(irl.IcyGridWorld(30))) <= 60
    assert not irl.IcyGridWorld(30).wide
    assert not irl.IcyGridWorld(320).wide, "a square is what factors are for, however large"
    assert anywhere(900).wide
    assert not random_world(np.random.default_rng(0), num_states=40).wide, "small"


def test_a_world_of_hubs_is_wide() -> None:
    """Every state leads to 300 others: each is a hub, and each counts."""
    assert leading(np.random.default_rng(0).integers(0, 700, (700, 300)), 1, ends=False).wide


def test_a_singular_system_is_a_divergence_wherever_it_is_met() -> None:
    """A way out of probability 10⁻¹⁷ is none in double precision, though the table names it."""
    world = irl.TabularMDP.from_sparse(csr_array([[1.0, 1e-17], [0, 0]]), num_actions=1, start=0, terminal=[1])
    for asked in (
        lambda: path_partition(world, np.zeros(2)),
        lambda: irl.value_iteration(world, np.array([-1.0, 0.0]), discount=1.0),
        lambda: irl.soft_policy_iteration(irl.Problem(mdp=world, reward=np.array([-1.0, 0.0]), discount=1.0)),
        lambda: irl.occupancy(world, np.ones((2, 1)), discount=1.0),
    ):
        with pytest.raises(irl.Divergence):
            asked()


def test_a_state_to_which_all_return_separates_nothing() -> None:
    """Every step may end at once, or lead back to the start: the grid below is as flat as it was."""
    grid, pairs = irl.IcyGridWorld(40, terminal=()), np.arange(6400)
    places = (np.tile(pairs, 2), np.repeat([0, 1599], 6400))
    table = 0.9 * grid.transitions + csr_array((np.full(12800, 0.05), places), shape=(6400, 1600))
    hubs = irl.TabularMDP.from_sparse(table, num_actions=4, start=0, terminal=[1599])
    assert width(state_graph(hubs)) <= 80
    assert not hubs.wide


@pytest.mark.parametrize(
    "fitter", [irl.MaxCausalEntIRL(), irl.MaxCausalEntIRL(discount=0.9, solver="lbfgs"), irl.MaxEntIRL()]
)
def test_a_fit_is_the_same_by_iteration(fitter, monkeypatch) -> None:
    world, reward = irl.IcyGridWorld(8), irl.LinearReward(features=irl.tiles(8, 4))
    shown = aimless(world, 20)
    exact = fitter.fit(world, reward, shown)
    monkeypatch.setattr(linear_solvers, "NARROW", 5)
    monkeypatch.setattr(linear_solvers, "SQUARE", 0.5)
    thick = irl.IcyGridWorld(8)
    assert thick.wide
    found = fitter.fit(thick, reward, shown)
    np.testing.assert_allclose(found.weights, exact.weights, atol=1e-6)
    np.testing.assert_allclose(found.policy, exact.policy, atol=1e-8)


def path_of(states: list[int], num_states: int) -> csr_array:
    """Steps from each of the states to the next in the list."""
    return csr_array((np.full(len(states) - 1, 0.1), (states[:-1], states[1:])), shape=(num_states, num_states))


def test_a_width_counts_steps_from_an_end_of_the_largest_part() -> None:
    assert width(state_graph(irl.IcyGridWorld(30))) == 30, "from a corner, whatever the probabilities"
    assert width(path_of([3, 1, 0, 2, 4], 5)) == 1, "though the first state is its middle"
    assert width(path_of([*range(5), *range(9, 4, -1)], 10)) == 1, "and steps lead one way only"
    beside = path_of([0, 1], 32) + csr_array((np.ones(27), ([2] * 27, range(3, 30))), shape=(32, 32))
    assert width(beside) == 26, "two states apart from a star, of which one point is the end"
    assert width(csr_array((4, 4))) == 1


SEEDS = st.integers(0, 10_000)
UNIFORM = np.full((9, 4), 0.25)


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
