"""Planning at its limits: one action or none, rewards of every size, discounts next to 1, episodes next to endless."""

import numpy as np
import pytest

from posttrain.irl import planning
from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.divergence import Divergence
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.finite_horizon import soft_finite_horizon
from posttrain.irl.grids import GridWorld
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.occupancies import occupancy
from posttrain.irl.paths import path_partition
from posttrain.irl.planning import Problem, soft_policy_iteration, soft_value_iteration, value_iteration
from tests.support.irl_worlds import chain, random_world
from tests.support.refusals import refused


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_with_one_action_values_are_what_it_earns(temperature) -> None:
    """No choice, so no entropy: along 0, 1, 2, 3 the rewards 5, 7, 11 and, on arriving, 13."""
    reward = np.array([5.0, 7.0, 11.0, 13.0])
    expected = [5 + 0.5 * (7 + 0.5 * (11 + 0.5 * 13)), 7 + 0.5 * (11 + 0.5 * 13), 11 + 0.5 * 13, 13]
    problem = Problem(mdp=chain(4, ends=True), reward=reward, discount=0.5, temperature=temperature)
    for plan in (soft_policy_iteration, soft_value_iteration):
        np.testing.assert_allclose(plan(problem).values, expected, rtol=1e-12)
        assert plan(problem).policy.tolist() == [[1.0]] * 4
    finite = soft_finite_horizon(problem, horizon=2)
    np.testing.assert_allclose(finite.values[0], [5 + 0.5 * 7, *expected[1:]], rtol=1e-12)
    whole = Problem(mdp=chain(4, ends=True), reward=reward, discount=1.0, temperature=temperature)
    np.testing.assert_allclose(soft_policy_iteration(whole).values, [36, 31, 24, 13], rtol=1e-12)


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_where_every_state_is_terminal_an_episode_is_over_as_it_starts(discount) -> None:
    mdp = TabularMDP.from_dense(
        np.full((2, 3, 2), 0.5), layout="state action next", start=[0.5, 0.5], terminal=[True, True]
    )
    problem = Problem(mdp=mdp, reward=np.array([2.0, 3.0]), discount=discount)
    assert soft_policy_iteration(problem).values.tolist() == soft_value_iteration(problem).values.tolist() == [2, 3]
    assert value_iteration(mdp, problem.reward, discount=discount).tolist() == [2, 3]
    assert soft_finite_horizon(problem, horizon=3).values.tolist() == [[2, 3]] * 4
    policy = np.full((2, 3), 1 / 3)
    assert occupancy(mdp, policy, discount=discount).tolist() == [0.5, 0.5]
    shown = sample_demonstrations(mdp, policy, num_episodes=3, rng=np.random.default_rng(0))
    assert MaxCausalEntIRL(discount=discount).fit(mdp, LinearReward(features=np.eye(2)), shown).gap == 0


def test_small_rewards_are_planned_as_exactly_beside_large_ones_as_alone() -> None:
    """A lone state earns 1000 for ever; 40 others, of which none leads to it, a thousandth, at a low temperature."""
    rng = np.random.default_rng(5)
    alone, table = np.zeros((40, 3, 40)), np.zeros((41, 3, 41))
    alone[np.arange(40)[:, None], np.arange(3), rng.integers(40, size=(40, 3))] = 1
    table[:40, :, :40], table[40, :, 40] = alone, 1
    reward = np.append(1e-3 * rng.normal(size=(40, 3)), np.full((1, 3), 1e3), axis=0)
    few, all_of_them = (
        soft_policy_iteration(
            Problem(
                mdp=TabularMDP.from_dense(each, layout="state action next", start=0),
                reward=reward[: len(each)],
                discount=0.99,
                temperature=1e-6,
            )
        )
        for each in (alone, table)
    )
    np.testing.assert_allclose(all_of_them.values[:40], few.values, rtol=0, atol=1e-9)
    assert all_of_them.values[40] == pytest.approx(1e5)


def test_what_an_action_in_a_terminal_state_would_earn_makes_no_value_less_exact() -> None:
    rng = np.random.default_rng(1)
    mdp = random_world(rng)
    reward = rng.normal(size=(6, 3))
    vast = np.where(mdp.terminal[:, None], 1e15, reward)
    plain, other = (soft_policy_iteration(Problem(mdp=mdp, reward=r, discount=0.9)) for r in (reward, vast))
    np.testing.assert_array_equal(plain.values, other.values)


@pytest.mark.parametrize("discount", [0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("pay", [1.0, 1e3])
def test_value_iteration_settles_however_near_one_the_discount_is(discount, pay) -> None:
    """In a circle that can be taken either way: one way pays 1 on each step, the other 3 on one of its four."""
    table = np.zeros((4, 2, 4))
    table[range(4), 0, [1, 2, 3, 0]] = table[range(4), 1, [3, 0, 1, 2]] = 1
    circle = TabularMDP.from_dense(table, layout="state action next", start=0)
    reward = pay * np.array([[1.0, 0], [1, 0], [1, 3], [1, 0]])
    values = value_iteration(circle, reward, discount=discount)
    # Back and forth between 2 and 1, earning 3 and 1, beats the circle's 1 and 1.
    best = pay * (3 + discount) / (1 - discount**2)
    assert values[2] == pytest.approx(best, rel=1e-10)
    assert values[1] == pytest.approx(pay + discount * best, rel=1e-10)


def test_a_walk_that_takes_its_time_is_not_mistaken_for_one_without_end() -> None:
    """One step up or down, each as likely, and at 0 up or none: from i to n it takes n(n + 1) - i(i + 1) steps."""
    length = 300
    table = np.zeros((length + 1, 1, length + 1))
    for state in range(length):
        table[state, 0, [max(state - 1, 0), state + 1]] = 0.5
    table[length, 0, length] = 1
    mdp = TabularMDP.from_dense(table, layout="state action next", start=0, terminal=[length])
    place = np.arange(length + 1)
    reward = np.where(mdp.terminal, 0.0, -1.0)
    expected = place * (place + 1.0) - length * (length + 1)
    np.testing.assert_allclose(value_iteration(mdp, reward, discount=1.0), expected, rtol=1e-9, atol=1e-6)
    problem = Problem(mdp=mdp, reward=reward, discount=1.0)
    np.testing.assert_allclose(soft_policy_iteration(problem).values, expected, rtol=1e-9, atol=1e-6)
    with refused("Use soft_policy_iteration", error=Divergence):
        soft_value_iteration(problem)


def test_sweeps_that_have_not_settled_say_what_would(monkeypatch) -> None:
    monkeypatch.setattr(planning, "MAX_SWEEPS", 100)
    problem = Problem(mdp=GridWorld(3, terminal=()), reward=np.arange(9.0), discount=0.999, temperature=0.5)
    with refused("discount 0.999 and temperature 0.5: … Use soft_policy_iteration", error=Divergence):
        soft_value_iteration(problem)


def test_episodes_so_long_that_rounding_would_show_are_an_error() -> None:
    """Stay or end, at a cost c for each step: V = log Z = -log(e^c - 1), and an episode takes 1/(1 - e^-c) steps."""
    table = np.zeros((2, 2, 2))
    table[0, [0, 1], [0, 1]] = 1
    mdp = TabularMDP.from_dense(table, layout="state action next", start=0, terminal=[1])
    for cost in (1e-2, 1e-4, 1e-6):
        plan = soft_policy_iteration(Problem(mdp=mdp, reward=np.array([-cost, 0.0]), discount=1.0))
        assert plan.values[0] == pytest.approx(-np.log(np.expm1(cost)), rel=1e-9)
        paths = path_partition(mdp, np.array([-cost, 0.0]))
        assert paths.values[0] == pytest.approx(-np.log(np.expm1(cost)), rel=1e-9)
    for cost in (1e-10, 1e-12, 1e-14, 0.0):
        with refused("discount 1.0 and temperature 1.0", error=Divergence):
            soft_policy_iteration(Problem(mdp=mdp, reward=np.array([-cost, 0.0]), discount=1.0))
        with refused("the partition function over paths is infinite", error=Divergence):
            path_partition(mdp, np.array([-cost, 0.0]))
