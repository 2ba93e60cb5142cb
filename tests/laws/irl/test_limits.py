"""Iterations give up on what has no end, never on what takes long; and they stop where they are as exact as asked."""

import numpy as np
import pytest
from numpy import ndarray

from posttrain.irl import paths, planning
from posttrain.irl.grids import GridWorld, IcyGridWorld
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.paths import path_partition
from posttrain.irl.planning import (
    UNBOUNDED,
    Problem,
    StallDetector,
    soft_policy_iteration,
    soft_value_iteration,
    value_iteration,
)
from tests.support.irl_worlds import chain, dense_transitions, random_world


def sweeps_until_stuck(detector: StallDetector, shrinking: float, *, most: int = 20_000) -> int | None:
    """How many sweeps of changes 1, ρ, ρ², ... are watched before they are given up."""
    change = 1.0
    for sweep in range(1, most + 1):
        if detector.stuck(change):
            return sweep
        change *= shrinking
    return None


@pytest.mark.parametrize(("num_states", "window"), [(10, 1000), (3000, 6000)])
def test_changes_that_do_not_shrink_are_given_up_after_two_windows(num_states: int, window: int) -> None:
    """A chain of S states takes S sweeps of equal change before it settles, so a window is at least 2 S."""
    assert sweeps_until_stuck(StallDetector(num_states), 1.0) == 2 * window
    assert sweeps_until_stuck(StallDetector(num_states), 1.0001) == 2 * window


def test_changes_that_shrink_are_given_up_only_where_they_never_would_be_small() -> None:
    """Over a window of n sweeps ρⁿ < 1 - n/10⁹ is enough: episodes of 10⁹ steps are too long for double precision."""
    for shrinking in (0.5, 0.999, 1 - 2 / UNBOUNDED):
        assert sweeps_until_stuck(StallDetector(10), shrinking) is None
    assert sweeps_until_stuck(StallDetector(10), 1 - 0.5 / UNBOUNDED) == 2000


def test_the_scale_of_a_problem_is_the_reward_or_the_entropy_of_a_step_whichever_is_more() -> None:
    reward = np.zeros(9)
    reward[3], reward[5] = -7.0, 2.0
    scales = [
        Problem(mdp=GridWorld(3), reward=given, discount=1.0, temperature=temperature).scale
        for given, temperature in ((reward, 1.0), (reward, 10.0), (np.zeros(9), 0.5))
    ]
    assert scales == pytest.approx([7.0, 10 * np.log(4), 0.5 * np.log(4)])


def lingering(*stays: float) -> TabularMDP:
    """States in each of which one stays with some probability, and else comes to an end; a single action."""
    size = len(stays)
    table = np.zeros((size + 1, 1, size + 1))
    table[range(size), 0, range(size)] = stays
    table[:, 0, size] += 1 - table.sum(axis=(1, 2))
    start = [*np.full(size, 1 / size), 0.0]
    return TabularMDP.from_dense(table, layout="state action next", start=start, terminal=[size])


@pytest.mark.parametrize(("discount", "stay"), [(1.0, 0.95), (0.95, 1 - 1e-12)])
@pytest.mark.parametrize("cost", [3e-6, 3.0, 3e6])
def test_sweeps_stop_within_the_tolerance_and_as_soon_as_they_are_there(discount, stay, cost) -> None:
    """V_k = -c (1 - ρᵏ)/(1 - ρ) with ρ = .95: values of 20 c, known to a thousandth of that and no better than it."""
    problem = Problem(mdp=lingering(stay), reward=np.array([-cost, 0.0]), discount=discount)
    error = abs(soft_value_iteration(problem, tolerance=1e-3).values[0] + 20 * cost)
    assert 0.9e-3 * 20 * cost < error < 1.001e-3 * 20 * cost
    assert soft_value_iteration(problem).values[0] == pytest.approx(-20 * cost, rel=1e-10)


def test_with_a_discount_a_part_that_settles_soon_does_not_hide_one_that_does_not() -> None:
    """Changes of the first shrink tenfold a sweep, while the second's, as yet too small to show, go on for hundreds."""
    discount = 0.99
    problem = Problem(mdp=lingering(0.1 / discount, 1 - 1e-12), reward=np.array([-1.0, -0.005, 0.0]), discount=discount)
    values = soft_value_iteration(problem, tolerance=1e-3).values
    np.testing.assert_allclose(values, [-1 / 0.9, -0.5, 0], rtol=0, atol=1.2e-3)


def by_policies(mdp: TabularMDP, reward: ndarray) -> ndarray:
    return soft_policy_iteration(Problem(mdp=mdp, reward=reward, discount=1.0)).values


def by_sweeps(mdp: TabularMDP, reward: ndarray) -> ndarray:
    return soft_value_iteration(Problem(mdp=mdp, reward=reward, discount=1.0)).values


def by_paths(mdp: TabularMDP, reward: ndarray) -> ndarray:
    return path_partition(mdp, reward).values


@pytest.mark.parametrize("solve", [by_policies, by_sweeps, by_paths])
def test_values_far_above_a_steps_reward_settle(solve) -> None:
    """3,000 steps of -1234.567 add up to -3.7 · 10⁶, whose rounding is far above that of a step."""
    values = solve(chain(3000, ends=True), np.full(3000, -1234.567))
    np.testing.assert_allclose(values, -1234.567 * (3000 - np.arange(3000.0)), rtol=1e-11)


@pytest.mark.parametrize("solve", [by_policies, by_paths])
@pytest.mark.parametrize("short_of_it", [1e-1, 1e-3, 1e-6])
def test_values_near_infinity_are_those_of_the_geometric_series(solve, short_of_it) -> None:
    """One stays or ends: Z = e^r (Z + 1), so V = r - log(1 - e^r), and steps towards it only halve at first."""
    table = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    mdp = TabularMDP.from_dense(table, layout="state action next", start=0, terminal=[1])
    reward = np.array([np.log1p(-short_of_it), 0.0])
    assert solve(mdp, reward)[0] == pytest.approx(reward[0] - np.log(short_of_it), abs=1e-8)


def uniform_values(mdp: TabularMDP, worth: ndarray, reward: ndarray) -> ndarray:
    """V = worth + Σ P V over uniform actions, solved densely; an end is worth its reward."""
    going = dense_transitions(mdp).mean(axis=1)
    return np.linalg.solve(np.eye(mdp.num_states) - going, np.where(mdp.terminal, reward, worth))


def test_planning_begins_with_the_uniform_policy_and_each_solve_improves_on_it(monkeypatch) -> None:
    rng, seen, sweep = np.random.default_rng(3), [], Problem.sweep
    monkeypatch.setattr(Problem, "sweep", lambda self, values: (seen.append(values), sweep(self, values))[1])
    mdp, reward = random_world(rng), -3 - rng.exponential(size=(6, 3))
    plan = soft_policy_iteration(Problem(mdp=mdp, reward=reward, discount=1.0, temperature=2.0))
    worth = reward.mean(axis=1) + 2 * np.log(3)  # a step's reward and its entropy
    np.testing.assert_allclose(seen[0], uniform_values(mdp, worth, np.zeros(6)), rtol=1e-12)
    assert len(seen) > 3
    assert np.all(np.diff([*seen, plan.values], axis=0) >= -1e-12)


def test_paths_begin_with_the_uniform_choice_and_each_solve_improves_on_it(monkeypatch) -> None:
    rng, seen, dynamics = np.random.default_rng(3), [], paths.tilted_dynamics
    monkeypatch.setattr(paths, "tilted_dynamics", lambda *given: (seen.append(given[2]), dynamics(*given))[1])
    mdp, reward = random_world(rng), -3 - rng.exponential(size=6)
    plan = path_partition(mdp, reward)
    np.testing.assert_allclose(seen[0], uniform_values(mdp, reward + np.log(3), reward), rtol=1e-12)
    assert len(seen) > 3
    assert np.all(np.diff([*seen, plan.values], axis=0) >= -1e-12)


def test_from_its_own_solution_planning_takes_one_solve(monkeypatch) -> None:
    mdp, solves = IcyGridWorld(4), []
    reward = -2 - np.random.default_rng(0).exponential(size=16)
    problem = Problem(mdp=mdp, reward=reward, discount=1.0)
    solved, partition = soft_policy_iteration(problem).values, path_partition(mdp, reward).values
    for module, name in ((planning, "policy_system"), (paths, "resolvent")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, real=real, **named: (solves.append(given), real(*given, **named))[1]
        )
    misplaced = np.where(mdp.terminal, 7.0, 0.0)  # what a guess says of ends is not used
    soft_policy_iteration(problem, guess=solved + misplaced)
    path_partition(mdp, reward, guess=partition + misplaced)
    assert len(solves) == 2


def test_value_iteration_stops_where_no_sweep_changes_more_than_the_tolerance() -> None:
    """V_k = -20 (1 - .95ᵏ): changes of .95ᵏ fall below a hundredth at k = 90, 20 · .95⁹⁰ = .198 from the end."""
    values = value_iteration(lingering(0.95), np.array([-1.0, 0.0]), discount=1.0, tolerance=0.01)
    assert values[0] == pytest.approx(-20 * (1 - 0.95**91), rel=1e-12)
