"""Iterations give up on what has no end, never on what takes long; and planning where it is hardest."""

import numpy as np
import pytest
from numpy import ndarray

from posttrain import irl
from posttrain.irl import paths, planning
from posttrain.irl.paths import path_partition
from posttrain.irl.planning import UNBOUNDED, StallDetector
from tests.support.irl_worlds import aimless, chain, dense_transitions, of_table, random_world, uniform_policy
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("num_states", "shrinking", "given_up"),
    [
        *((states, shrinking, max(2000, 4 * states)) for states in (10, 3000) for shrinking in (1.0, 1.0001)),
        *((10, shrinking, None) for shrinking in (0.5, 0.999, 1 - 2 / UNBOUNDED)),
        (10, 1 - 0.5 / UNBOUNDED, 2000),
    ],
)
def test_changes_are_given_up_after_two_windows_if_they_would_never_be_small(num_states, shrinking, given_up) -> None:
    """A chain of S states takes S sweeps of equal change before it settles, so a window is at least 2 S.

    Over a window of n sweeps ρⁿ < 1 - n/10⁹ is enough: episodes of 10⁹ steps are too long for double precision.
    """
    detector = StallDetector(num_states)
    sweeps = (sweep for sweep in range(1, 20_001) if detector.stuck(shrinking ** (sweep - 1)))
    assert next(sweeps, None) == given_up


def test_the_scale_of_a_problem_is_the_reward_or_the_entropy_of_a_step_whichever_is_more() -> None:
    reward = np.zeros(9)
    reward[3], reward[5] = -7.0, 2.0
    scales = [
        irl.Problem(mdp=irl.GridWorld(3), reward=given, discount=1.0, temperature=temperature).scale
        for given, temperature in ((reward, 1.0), (reward, 10.0), (np.zeros(9), 0.5))
    ]
    assert scales == pytest.approx([7.0, 10 * np.log(4), 0.5 * np.log(4)])


def lingering(*stays: float) -> irl.TabularMDP:
    """States in each of which one stays with some probability, and else comes to an end; a single action."""
    table = np.diag([*stays, 0.0])[:, None]
    table[:, 0, -1] += 1 - table.sum(axis=(1, 2))
    return of_table(table, start=[*np.full(len(stays), 1 / len(stays)), 0.0], ends=[len(stays)])


@pytest.mark.parametrize(("discount", "stay"), [(1.0, 0.95), (0.95, 1 - 1e-12)])
@pytest.mark.parametrize("cost", [3e-6, 3.0, 3e6])
def test_sweeps_stop_within_the_tolerance_and_as_soon_as_they_are_there(discount, stay, cost) -> None:
    """V_k = -c (1 - ρᵏ)/(1 - ρ) with ρ = .95: values of 20 c, known to a thousandth of that and no better than it."""
    problem = irl.Problem(mdp=lingering(stay), reward=np.array([-cost, 0.0]), discount=discount)
    error = abs(irl.soft_value_iteration(problem, tolerance=1e-3).values[0] + 20 * cost)
    assert 0.9e-3 * 20 * cost < error < 1.001e-3 * 20 * cost
    assert irl.soft_value_iteration(problem).values[0] == pytest.approx(-20 * cost, rel=1e-10)


def test_with_a_discount_a_part_that_settles_soon_does_not_hide_one_that_does_not() -> None:
    """Changes of the first shrink tenfold a sweep, while the second's, as yet too small to show, go on for hundreds."""
    discount = 0.99
    world, reward = lingering(0.1 / discount, 1 - 1e-12), np.array([-1.0, -0.005, 0.0])
    problem = irl.Problem(mdp=world, reward=reward, discount=discount)
    values = irl.soft_value_iteration(problem, tolerance=1e-3).values
    np.testing.assert_allclose(values, [-1 / 0.9, -0.5, 0], rtol=0, atol=1.2e-3)


def solved(mdp: irl.TabularMDP, reward: ndarray, discount: float = 1.0, temperature: float = 1.0):
    return irl.soft_policy_iteration(irl.Problem(mdp=mdp, reward=reward, discount=discount, temperature=temperature))


def by_policies(mdp: irl.TabularMDP, reward: ndarray) -> ndarray:
    return solved(mdp, reward).values


def by_sweeps(mdp: irl.TabularMDP, reward: ndarray) -> ndarray:
    return irl.soft_value_iteration(irl.Problem(mdp=mdp, reward=reward, discount=1.0)).values


def by_paths(mdp: irl.TabularMDP, reward: ndarray) -> ndarray:
    return path_partition(mdp, reward).values


def by_values(mdp: irl.TabularMDP, reward: ndarray) -> ndarray:
    return irl.value_iteration(mdp, reward, discount=1.0)


@pytest.mark.parametrize("solve", [by_policies, by_sweeps, by_paths, by_values])
def test_values_far_above_a_steps_reward_settle(solve) -> None:
    """3,000 steps of -1234.567 add up to -3.7 · 10⁶, whose rounding is far above that of a step.

    In 3,000 sweeps every sweep changes some value as much as the first did, and then none does.
    """
    values = solve(chain(3000, ends=True), np.full(3000, -1234.567))
    np.testing.assert_allclose(values, -1234.567 * (3000 - np.arange(3000.0)), rtol=1e-11)


def uniform_values(mdp: irl.TabularMDP, worth: ndarray, reward: ndarray) -> ndarray:
    """V = worth + Σ P V over uniform actions, solved densely; an end is worth its reward."""
    going = dense_transitions(mdp).mean(axis=1)
    return np.linalg.solve(np.eye(mdp.num_states) - going, np.where(mdp.terminal, reward, worth))


def test_planning_begins_with_the_uniform_policy_and_each_solve_improves_on_it(monkeypatch) -> None:
    rng, seen, sweep = np.random.default_rng(3), [], irl.Problem.sweep
    monkeypatch.setattr(irl.Problem, "sweep", lambda self, values: (seen.append(values), sweep(self, values))[1])
    mdp, reward = random_world(rng), -3 - rng.exponential(size=(6, 3))
    plan = solved(mdp, reward, temperature=2.0)
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
    mdp, solves = irl.IcyGridWorld(4), []
    reward = -2 - np.random.default_rng(0).exponential(size=16)
    problem = irl.Problem(mdp=mdp, reward=reward, discount=1.0)
    solved, partition = irl.soft_policy_iteration(problem).values, path_partition(mdp, reward).values
    for module, name in ((planning, "policy_system"), (paths, "resolvent")):
        real = getattr(module, name)
        noted = lambda *given, real=real, **named: (solves.append(given), real(*given, **named))[1]
        monkeypatch.setattr(module, name, noted)
    misplaced = np.where(mdp.terminal, 7.0, 0.0)  # what a guess says of ends is not used
    irl.soft_policy_iteration(problem, guess=solved + misplaced)
    path_partition(mdp, reward, guess=partition + misplaced)
    assert len(solves) == 2


def test_value_iteration_stops_where_no_sweep_changes_more_than_the_tolerance() -> None:
    """V_k = -20 (1 - .95ᵏ): changes of .95ᵏ fall below a hundredth at k = 90, 20 · .95⁹⁰ = .198 from the end."""
    values = irl.value_iteration(lingering(0.95), np.array([-1.0, 0.0]), discount=1.0, tolerance=0.01)
    assert values[0] == pytest.approx(-20 * (1 - 0.95**91), rel=1e-12)


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_with_one_action_values_are_what_it_earns(temperature) -> None:
    """No choice, so no entropy: along 0, 1, 2, 3 the rewards 5, 7, 11 and, on arriving, 13."""
    reward = np.array([5.0, 7.0, 11.0, 13.0])
    expected = [5 + 0.5 * (7 + 0.5 * (11 + 0.5 * 13)), 7 + 0.5 * (11 + 0.5 * 13), 11 + 0.5 * 13, 13]
    problem = irl.Problem(mdp=chain(4, ends=True), reward=reward, discount=0.5, temperature=temperature)
    for plan in (irl.soft_policy_iteration, irl.soft_value_iteration):
        np.testing.assert_allclose(plan(problem).values, expected, rtol=1e-12)
        assert plan(problem).policy.tolist() == [[1.0]] * 4
    finite = irl.soft_finite_horizon(problem, horizon=2)
    np.testing.assert_allclose(finite.values[0], [5 + 0.5 * 7, *expected[1:]], rtol=1e-12)
    whole = solved(chain(4, ends=True), reward, temperature=temperature)
    np.testing.assert_allclose(whole.values, [36, 31, 24, 13], rtol=1e-12)


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_where_every_state_is_terminal_an_episode_is_over_as_it_starts(discount) -> None:
    mdp = of_table(np.full((2, 3, 2), 0.5), start=[0.5, 0.5], ends=[True, True])
    problem = irl.Problem(mdp=mdp, reward=np.array([2.0, 3.0]), discount=discount)
    for plan in (irl.soft_policy_iteration, irl.soft_value_iteration):
        assert plan(problem).values.tolist() == [2, 3]
    assert irl.value_iteration(mdp, problem.reward, discount=discount).tolist() == [2, 3]
    assert irl.soft_finite_horizon(problem, horizon=3).values.tolist() == [[2, 3]] * 4
    assert irl.occupancy(mdp, uniform_policy(mdp), discount=discount).tolist() == [0.5, 0.5]
    shown = aimless(mdp, 3)
    assert irl.MaxCausalEntIRL(discount=discount).fit(mdp, irl.LinearReward(features=np.eye(2)), shown).gap == 0


def test_small_rewards_are_planned_as_exactly_beside_large_ones_as_alone() -> None:
    """A lone state earns 1000 for ever; 40 others, of which none leads to it, a thousandth, at a low temperature."""
    rng = np.random.default_rng(5)
    alone, table = np.zeros((40, 3, 40)), np.zeros((41, 3, 41))
    alone[np.arange(40)[:, None], np.arange(3), rng.integers(40, size=(40, 3))] = 1
    table[:40, :, :40], table[40, :, 40] = alone, 1
    reward = np.append(1e-3 * rng.normal(size=(40, 3)), np.full((1, 3), 1e3), axis=0)
    few, all_of_them = (solved(of_table(each), reward[: len(each)], 0.99, 1e-6) for each in (alone, table))
    np.testing.assert_allclose(all_of_them.values[:40], few.values, rtol=0, atol=1e-9)
    assert all_of_them.values[40] == pytest.approx(1e5)


def test_what_an_action_in_a_terminal_state_would_earn_makes_no_value_less_exact() -> None:
    rng = np.random.default_rng(1)
    mdp = random_world(rng)
    reward = rng.normal(size=(6, 3))
    vast = np.where(mdp.terminal[:, None], 1e15, reward)
    plain, other = (solved(mdp, each, 0.9) for each in (reward, vast))
    np.testing.assert_array_equal(plain.values, other.values)


@pytest.mark.parametrize("discount", [0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("pay", [1.0, 1e3])
def test_value_iteration_settles_however_near_one_the_discount_is(discount, pay) -> None:
    """In a circle that can be taken either way: one way pays 1 on each step, the other 3 on one of its four."""
    table = np.zeros((4, 2, 4))
    table[range(4), 0, [1, 2, 3, 0]] = table[range(4), 1, [3, 0, 1, 2]] = 1
    reward = pay * np.array([[1.0, 0], [1, 0], [1, 3], [1, 0]])
    values = irl.value_iteration(of_table(table), reward, discount=discount)
    # Back and forth between 2 and 1, earning 3 and 1, beats the circle's 1 and 1.
    best = pay * (3 + discount) / (1 - discount**2)
    assert values[2] == pytest.approx(best, rel=1e-10)
    assert values[1] == pytest.approx(pay + discount * best, rel=1e-10)


def test_a_walk_that_takes_its_time_is_not_mistaken_for_one_without_end() -> None:
    """One step up or down, each as likely, and at 0 up or none: from i to n it takes n(n + 1) - i(i + 1) steps."""
    length = 300
    place = np.arange(length + 1)
    table = np.zeros((length + 1, 1, length + 1))
    table[place[:-1], 0, np.maximum(place[:-1] - 1, 0)] = table[place[:-1], 0, place[1:]] = 0.5
    mdp = of_table(table, ends=[length])
    reward = np.where(mdp.terminal, 0.0, -1.0)
    expected = place * (place + 1.0) - length * (length + 1)
    for solve in (by_values, by_policies):
        np.testing.assert_allclose(solve(mdp, reward), expected, rtol=1e-9, atol=1e-6)
    with refused("Use soft_policy_iteration", error=irl.Divergence):
        by_sweeps(mdp, reward)


def test_sweeps_that_have_not_settled_say_what_would(monkeypatch) -> None:
    monkeypatch.setattr(planning, "MAX_SWEEPS", 100)
    problem = irl.Problem(mdp=irl.GridWorld(3, terminal=()), reward=np.arange(9.0), discount=0.999, temperature=0.5)
    with refused("discount 0.999 and temperature 0.5: … Use soft_policy_iteration", error=irl.Divergence):
        irl.soft_value_iteration(problem)


@pytest.mark.parametrize(
    ("solve", "words"),
    [(by_policies, "discount 1.0 and temperature 1.0"), (by_paths, "the partition function over paths is infinite")],
)
def test_episodes_so_long_that_rounding_would_show_are_an_error(solve, words) -> None:
    """Stay or end, at a cost c for each step: V = log Z = -log(e^c - 1), and an episode takes 1/(1 - e^-c) steps."""
    table = np.zeros((2, 2, 2))
    table[0, [0, 1], [0, 1]] = 1
    mdp = of_table(table, ends=[1])
    for cost in (1e-1, 1e-2, 1e-4, 1e-6):  # steps towards the last only halve at first
        assert solve(mdp, np.array([-cost, 0.0]))[0] == pytest.approx(-np.log(np.expm1(cost)), rel=1e-9)
    for cost in (1e-10, 1e-12, 1e-14, 0.0):
        with refused(words, error=irl.Divergence):
            solve(mdp, np.array([-cost, 0.0]))
