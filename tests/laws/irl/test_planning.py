"""Soft planning, path probabilities and their refusals, against sweeps, dense solves and enumeration."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from posttrain import irl
from posttrain.irl.maxent import PathDual
from posttrain.irl.paths import path_partition
from tests.support import irl_worlds as worlds
from tests.support.irl_worlds import dense_transitions, of_table, random_world
from tests.support.refusals import refused, warned

TWO_STEPS = np.full((2, 9, 4), 0.25)
SEEDS = st.integers(0, 10_000)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.95, 1.0])
TEMPERATURES = st.sampled_from([0.2, 1.0, 3.0])


def costs(rng: np.random.Generator, mdp: irl.TabularMDP, temperature: float, *, per_action: bool = True) -> np.ndarray:
    """Rewards below the entropy that a step can add, so that values are finite at discount 1."""
    shape = (mdp.num_states, mdp.num_actions) if per_action else mdp.num_states
    return -temperature * (np.log(mdp.num_actions) + 0.1 + rng.exponential(size=shape))


def solved(mdp: irl.TabularMDP, reward: np.ndarray, discount: float = 1.0, temperature: float = 1.0):
    return irl.soft_policy_iteration(irl.Problem(mdp=mdp, reward=reward, discount=discount, temperature=temperature))


@given(seed=SEEDS, discount=DISCOUNTS, temperature=TEMPERATURES, per_action=st.booleans())
def test_policy_iteration_finds_what_sweeps_find(seed, discount, temperature, per_action) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng)
    reward = costs(rng, mdp, temperature, per_action=per_action)
    problem = irl.Problem(mdp=mdp, reward=reward, discount=discount, temperature=temperature)
    sweeps, solves = irl.soft_value_iteration(problem), irl.soft_policy_iteration(problem)
    np.testing.assert_allclose(solves.values, sweeps.values, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(solves.policy, sweeps.policy, rtol=1e-8, atol=1e-10)
    guessed = irl.soft_policy_iteration(problem, guess=rng.normal(size=mdp.num_states) * 10)
    np.testing.assert_allclose(guessed.values, sweeps.values, rtol=1e-9, atol=1e-9)


def test_a_guess_that_leads_into_a_corner_for_ever_does_no_harm() -> None:
    """Values that make the corner away from the goal seem a million better: its policy never leaves, at discount 1."""
    grid, reward, guess = irl.GridWorld(3), np.full(9, -3.0), np.where(np.arange(9) == 0, 1e6, 0.0)
    problem = irl.Problem(mdp=grid, reward=reward, discount=1.0)
    for solve in (partial(irl.soft_policy_iteration, problem), partial(path_partition, grid, reward)):
        np.testing.assert_allclose(solve(guess=guess).values, solve().values, rtol=1e-12)


@given(seed=SEEDS, discount=DISCOUNTS, temperature=TEMPERATURES)
def test_soft_values_are_reward_and_entropy_of_their_policy_and_none_has_more(seed, discount, temperature) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng)
    reward = costs(rng, mdp, temperature, per_action=False)
    plan = solved(mdp, reward, discount, temperature)

    def worth(policy: np.ndarray) -> float:
        """Σ_s D(s) (r(s) + τ H(π(·|s))), ends paying their reward on arrival."""
        visits = irl.occupancy(mdp, policy, discount=discount)
        entropy = -(policy * np.log(policy)).sum(axis=1)
        return float(visits @ (reward + temperature * np.where(mdp.terminal, 0, entropy)))

    best = float(mdp.start @ plan.values)
    assert worth(plan.policy) == pytest.approx(best, rel=1e-9)
    other = 0.9 * plan.policy + 0.1 * rng.dirichlet(np.ones(mdp.num_actions), mdp.num_states)
    assert worth(other) < best


@given(seed=SEEDS, discount=DISCOUNTS, horizon=st.integers(1, 6), temperature=TEMPERATURES)
def test_finite_horizons_equal_imitations_recursion_where_no_state_ends(seed, discount, horizon, temperature) -> None:
    """`mce_partition_fh` and `mce_occupancy_measures` of imitation 1.0.1, dense, no terminals, temperature 1."""
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=0)
    reward, table = rng.normal(size=mdp.num_states), dense_transitions(mdp)
    problem = irl.Problem(mdp=mdp, reward=reward * temperature, discount=discount, temperature=temperature)
    plan = irl.soft_finite_horizon(problem, horizon=horizon)
    values = np.zeros(mdp.num_states)
    policies = []
    for _ in range(horizon):
        q = reward[:, None] + discount * table @ values
        values = np.log(np.exp(q).sum(axis=1))
        policies.insert(0, np.exp(q - values[:, None]))
    np.testing.assert_allclose(plan.policy, policies, rtol=0, atol=1e-9)
    np.testing.assert_allclose(plan.values[0], values * temperature, rtol=1e-9, atol=1e-9)
    visits = [mdp.start]
    for policy in policies:
        visits.append(discount * np.einsum("s,sa,san->n", visits[-1], policy, table))
    counted = irl.finite_occupancy(mdp, plan.policy, discount=discount, horizon=horizon)
    np.testing.assert_allclose(counted, visits, rtol=0, atol=1e-9)


def every_path(mdp: irl.TabularMDP, steps: int):
    """Paths (states, actions) of at most so many steps from state 0, with the chance of their dynamics."""
    table, begun = dense_transitions(mdp), [([0], [], 1.0)]
    while begun:
        states, actions, chance = begun.pop()
        if mdp.terminal[states[-1]] or len(actions) == steps:
            yield states, actions, chance
            continue
        ahead = table[states[-1]]
        begun += [([*states, s], [*actions, a], chance * ahead[a, s]) for a, s in np.argwhere(ahead)]


@settings(max_examples=10)
@given(seed=SEEDS, temperature=TEMPERATURES, discount=st.sampled_from([0.7, 1.0]))
def test_values_and_visits_with_a_horizon_are_those_of_enumerated_paths(seed, temperature, discount) -> None:
    rng = np.random.default_rng(seed)
    mdp, horizon = random_world(rng, num_states=3, num_actions=2), 4
    reward = rng.normal(size=3)
    problem = irl.Problem(mdp=mdp, reward=reward, discount=discount, temperature=temperature)
    plan = irl.soft_finite_horizon(problem, horizon=horizon)
    total, visits, value = 0.0, np.zeros((horizon + 1, 3)), 0.0
    for states, actions, chance in every_path(mdp, horizon):
        choices = [plan.policy[t, states[t], action] for t, action in enumerate(actions)]
        probability = chance * np.prod(choices)
        total += probability
        for t, state in enumerate(states):
            visits[t, state] += discount**t * probability
        steps = [reward[states[t]] - temperature * np.log(choices[t]) for t in range(len(actions))]
        if mdp.terminal[states[-1]]:
            steps.append(reward[states[-1]])
        value += probability * sum(discount**t * step for t, step in enumerate(steps))
    assert total == pytest.approx(1, abs=1e-12)
    assert value == pytest.approx(plan.values[0, 0], abs=1e-10)
    sources = np.zeros((horizon + 1, 3))
    sources[0, 0] = 1
    np.testing.assert_allclose(plan.visits(sources), visits, rtol=0, atol=1e-12)
    assert sources.sum() == 1, "what was given is left as it was"
    assert plan.values.shape == (horizon + 1, 3)


@settings(max_examples=10)
@given(seed=SEEDS)
def test_the_partition_function_is_the_sum_over_enumerated_paths(seed) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_states=3, num_actions=2)
    reward = -7 - rng.exponential(size=3)
    plan = path_partition(mdp, reward)
    weights, visits, through = 0.0, np.zeros(3), np.zeros(2)
    for states, actions, chance in every_path(mdp, 6):
        if not mdp.terminal[states[-1]]:
            continue  # not over after 6 steps: less than (2 e⁻⁷)⁶ < 10⁻¹⁶ of what is
        weight = chance * np.exp(sum(reward[state] for state in states))
        weights += weight
        np.add.at(visits, states, weight)
        through[actions[0]] += weight
    assert plan.values[0] == pytest.approx(np.log(weights), abs=1e-10)
    np.testing.assert_allclose(plan.visits(np.array([1.0, 0, 0])), visits / weights, rtol=1e-9)
    np.testing.assert_allclose(plan.policy()[0], through / weights, rtol=1e-9)


@given(seed=SEEDS, discount=DISCOUNTS)
def test_value_iteration_finds_the_best_of_all_deterministic_policies(seed, discount) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_states=4, num_actions=2)
    reward = -rng.exponential(size=(4, 2))
    values = irl.value_iteration(mdp, reward, discount=discount, tolerance=1e-13)

    def worth(policy: np.ndarray) -> float:
        visits = irl.occupancy(mdp, policy, discount=discount)
        return float((visits[:, None] * policy * np.where(mdp.terminal[:, None], 0, reward)).sum())

    best = max(worth(np.eye(2)[[*choice, 0]]) for choice in itertools.product(range(2), repeat=3))
    assert mdp.start @ values == pytest.approx(best, rel=1e-9)
    greedy = irl.greedy_policy(mdp, irl.action_values(mdp, reward, values, discount=discount))
    assert worth(greedy) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("slip", [0.0, 0.3])
def test_a_grid_that_is_its_own_mirror_image_gets_a_policy_that_is_too(slip) -> None:
    grid = irl.IcyGridWorld(4, slip=slip)
    y, x = np.divmod(np.arange(16), 4)
    reward = -1.5 - 0.3 * np.sin(x + y) * np.cos(x - y)  # the same at (x, y) and (y, x)
    mirror, swapped = x * 4 + y, [2, 3, 0, 1]  # +x ↔ +y, -x ↔ -y
    for discount in (0.9, 1.0):
        plan = solved(grid, reward, discount)
        np.testing.assert_allclose(plan.policy, plan.policy[mirror][:, swapped], rtol=0, atol=1e-12)
        assert np.abs(plan.policy[1] - plan.policy[4]).max() > 0.01  # not because it is all the same


@given(seed=SEEDS, discount=DISCOUNTS, temperature=TEMPERATURES)
def test_potential_shaping_leaves_the_policy_as_it_was(seed, discount, temperature) -> None:
    """Ng, Harada & Russell 1999: adding γ E[Φ(s')] - Φ(s) changes no policy, if Φ is zero at the ends."""
    rng = np.random.default_rng(seed)
    mdp = random_world(rng)
    reward = costs(rng, mdp, temperature)
    potential = np.where(mdp.terminal, 0.0, rng.normal(size=mdp.num_states) * 5)
    gain = discount * (mdp.transitions @ potential).reshape(reward.shape) - potential[:, None]
    plain, shaped = (solved(mdp, each, discount, temperature) for each in (reward, reward + gain))
    np.testing.assert_allclose(plain.policy, shaped.policy, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(plain.values, shaped.values + potential, rtol=1e-9, atol=1e-9)


@given(seed=SEEDS, shift=st.floats(-5, 5), temperature=TEMPERATURES)
def test_a_constant_added_to_every_step_changes_no_policy_where_episodes_do_not_end(seed, shift, temperature) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=0)
    reward = rng.normal(size=mdp.num_states)
    a, b = (irl.Problem(mdp=mdp, reward=r, discount=0.9, temperature=temperature) for r in (reward, reward + shift))
    for solve in (irl.soft_policy_iteration, partial(irl.soft_finite_horizon, horizon=7)):
        np.testing.assert_allclose(solve(a).policy, solve(b).policy, rtol=0, atol=1e-9)


def test_where_episodes_end_a_constant_per_step_does_change_the_policy() -> None:
    slow, fast = (solved(irl.GridWorld(3), np.full(9, cost)).policy for cost in (-1.5, -5.0))
    assert np.abs(slow - fast).max() > 0.1


@given(
    seed=SEEDS,
    scale=st.sampled_from([1.0, 30.0, 1e3]),
    discount=st.sampled_from([0.5, 0.99, 1.0]),
    temperature=st.sampled_from([1e-6, 0.01, 1.0, 10.0, 1e6]),
    sign=st.sampled_from(["costs", "prizes", "both"]),
)
def test_rewards_up_to_a_thousand_never_overflow(seed, scale, discount, temperature, sign) -> None:
    """Finite values and a policy, or at discount 1 an error that says why: never NaN, never a warning."""
    rng = np.random.default_rng(seed)
    mdp = irl.IcyGridWorld(4, slip=float(rng.choice([0.0, 0.3])))
    low, high = {"costs": (-scale, 0.0), "prizes": (0.0, scale), "both": (-scale, scale)}[sign]
    reward = rng.uniform(low, high, size=16)
    problem = irl.Problem(mdp=mdp, reward=reward, discount=discount, temperature=temperature)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        try:
            plan = irl.soft_policy_iteration(problem)
        except irl.Divergence:
            assert discount == 1
        else:
            assert np.isfinite(plan.values).all()
            np.testing.assert_allclose(plan.policy.sum(axis=1), 1, rtol=1e-12)
            again, _ = problem.sweep(plan.values)
            np.testing.assert_allclose(again, plan.values, rtol=1e-6, atol=1e-9 * scale)
        finite = irl.soft_finite_horizon(problem, horizon=50)
        assert np.isfinite(finite.values).all()
        try:
            partition = path_partition(mdp, reward)
        except irl.Divergence:
            assert reward.max() > -np.log(4)
        else:
            assert np.isfinite(partition.values).all()
            assert np.isfinite(partition.policy()).all()


@pytest.mark.parametrize("plan", [irl.soft_policy_iteration, irl.soft_value_iteration])
def test_a_problem_that_diverges_is_an_error_naming_discount_and_temperature(plan) -> None:
    walled = np.zeros((3, 1, 3))  # 0 leads to 1, the end; 2, where no episode comes, to itself
    walled[[0, 2], 0, [1, 2]] = 1
    for mdp, cost, words in (
        (irl.GridWorld(3), 0.0, "discount 1.0 and temperature 0.7"),
        (irl.GridWorld(3, terminal=()), 9.0, "discount 1.0 … 9 states can never … first 0 … give it a way out"),
        (of_table(walled, ends=[1]), 1.0, "can never reach a terminal state, first 2 … leave it out of the world"),
    ):
        problem = irl.Problem(mdp=mdp, reward=np.full(mdp.num_states, -cost), discount=1.0, temperature=0.7)
        with refused(words, error=irl.Divergence):
            plan(problem)
    with refused("discount 1.0", error=irl.Divergence):
        irl.value_iteration(irl.GridWorld(3, terminal=()), np.ones(9), discount=1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: irl.Problem(mdp=g, reward=np.zeros(8), discount=0.9), "shape (8,); use (9,)"),
        (lambda g: irl.Problem(mdp=g, reward=np.where(np.arange(9) == 3, np.nan, 0), discount=0.9), "nan at (3)"),
        (lambda g: irl.Problem(mdp=g, reward=np.zeros(9), discount=1.1), "discount = 1.1"),
        (lambda g: irl.Problem(mdp=g, reward=np.zeros(9), discount=0.9, temperature=0.0), "temperature = 0.0"),
        (lambda g: irl.soft_finite_horizon(irl.Problem(mdp=g, reward=g.start, discount=1.0), horizon=0), "horizon = 0"),
        (lambda g: irl.action_values(g, np.full(9, np.nan), np.zeros(9), discount=0.9), "reward has nan at (0"),
        (lambda g: irl.action_values(g, np.zeros(9), np.zeros(9), discount=2.0), "discount = 2.0"),
        (lambda g: irl.value_iteration(g, np.zeros(9), discount=1.1), "discount = 1.1"),
        (lambda g: irl.occupancy(g, np.full((9, 4), 0.25), discount=-0.1), "discount = -0.1"),
        (lambda g: irl.finite_occupancy(g, np.full((9, 4), 0.25), discount=1.5, horizon=3), "discount = 1.5"),
        (lambda g: irl.occupancy(g, np.full((9, 3), 1 / 3), discount=0.9), "shape (9, 3); use (9, 4)"),
        (lambda g: irl.occupancy(g, np.tile([1.5, -0.5, 0, 0], (9, 1)), discount=0.9), "of state 0: [ 1.5 -0.5"),
        (lambda g: path_partition(g, np.full(9, np.nan)), "nan at (0"),
        (lambda g: irl.occupancy(g, np.full((9, 4), 0.3), discount=0.9), "policy of state 0: [0.3"),
        (lambda g: irl.finite_occupancy(g, np.full((9, 4), 0.3), discount=0.9, horizon=2), "policy of state 0"),
        (lambda g: irl.finite_occupancy(g, TWO_STEPS * [[[1]], [[np.nan]]], discount=1.0, horizon=2), "state 0"),
        (lambda g: irl.finite_occupancy(g, TWO_STEPS[0, :8], discount=1.0, horizon=2), "shape (8, 4); use (9, 4)"),
        (lambda g: irl.finite_occupancy(g, TWO_STEPS[0], discount=1.0, horizon=-1), "horizon = -1"),
        (lambda g: irl.finite_occupancy(g, TWO_STEPS, discount=1.0, horizon=3), "2 steps, and the horizon is 3"),
    ],
)
def test_what_cannot_be_planned_or_walked_is_refused(make, message) -> None:
    with refused(message):
        make(irl.GridWorld(3))


def test_rewards_beyond_all_reason_are_an_error_and_do_not_end_the_process() -> None:
    """Tilted to certainty, a loop that pays is a singular system with empty columns, in which SuperLU can crash."""
    world, rng = irl.IcyGridWorld(5, slip=0.2), np.random.default_rng(0)
    for _ in range(500):
        with refused("partition function over paths is infinite", error=irl.Divergence):
            path_partition(world, rng.normal(size=25) * 10.0 ** rng.uniform(3, 16))


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_the_slopes_of_algorithm_1_are_finite_differences(seed) -> None:
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng, num_ends=2)
    dual = PathDual(worlds.features_of(mdp, rng).bound(mdp), mdp.start, rng.normal(size=3), 0.2)
    weights = np.append(-4.0, rng.normal(size=2) * 0.3)
    true = worlds.slopes(lambda w: dual.algorithm1(dual.at(w)), weights).T
    np.testing.assert_allclose(dual.algorithm1_slopes(dual.at(weights)), true, rtol=0, atol=1e-6 * np.abs(true).max())


def test_the_exact_path_model_matches_its_own_paths_and_not_the_world() -> None:
    """Measured before: own gap .0043, executed gap .423, with l2 = 1e-3."""
    fit = worlds.fit_course(irl.MaxEntIRL(gradient="tilted"))
    assert fit.converged
    assert fit.gap == pytest.approx(0.0043, abs=1e-4)
    assert fit.executed_gap == pytest.approx(0.423, abs=1e-3)
    with warned("not converged"):
        assert worlds.fit_course(irl.MaxEntIRL(max_iterations=2)).num_iterations == 2


@pytest.mark.parametrize("l2", [1e-1, 1e-2, 1e-3, 1e-4])
def test_algorithm_1_finds_the_zero_of_its_direction_which_is_not_the_minimum(l2) -> None:
    """Executed, its policy stays .2 away from the demonstrations, however small the penalty: weights grow as 1/l2."""
    fit = worlds.fit_course(irl.MaxEntIRL(gradient="algorithm1", l2=l2))
    assert fit.converged
    assert fit.num_iterations <= 50
    np.testing.assert_allclose(fit.executed - fit.moments, -l2 * fit.weights, rtol=0, atol=1e-8)
    assert fit.executed_gap > 0.2
    assert np.abs(fit.expected - fit.moments + l2 * fit.weights).max() > 0.2  # the gradient of the likelihood there


def test_where_the_way_to_its_zero_is_blocked_a_stronger_penalty_leads_there() -> None:
    """On ice that slips in three of five steps, Newton's method alone creeps along the edge of infinite partitions."""
    world, rng = irl.IcyGridWorld(7, slip=0.6), np.random.default_rng(5)
    policy = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=-1.5 - rng.random(49), discount=1.0)).policy
    walks = irl.sample_demonstrations(world, policy, num_episodes=100, rng=rng)
    fit = irl.MaxEntIRL(gradient="algorithm1").fit(world, irl.LinearReward(features=np.eye(49)), walks)
    assert fit.converged
    np.testing.assert_allclose(fit.executed - fit.moments, -1e-3 * fit.weights, rtol=0, atol=1e-8)


def test_paths_are_fitted_by_fewer_features_than_states() -> None:
    features = irl.tiles(5, 3)
    fit = worlds.fit_course(irl.MaxEntIRL(l2=0.01), irl.LinearReward(features=features))
    visits = irl.occupancy(worlds.course_world(), fit.policy, discount=1.0)
    np.testing.assert_allclose(fit.executed, features.T @ visits, rtol=1e-9)
    np.testing.assert_allclose(fit.expected - fit.moments, -0.01 * fit.weights, rtol=0, atol=1e-7)


def test_the_unit_of_a_feature_keeps_no_fit_of_paths_from_its_end() -> None:
    features = irl.tiles(5, 2) * np.append([1e6, 1e-6], np.ones(8))
    fit = worlds.fit_course(irl.MaxEntIRL(), irl.LinearReward(features=features))
    assert fit.converged
    assert fit.num_iterations < 50


def test_without_a_zero_algorithm_1_soon_ends_and_claims_none() -> None:
    with warned("not converged: its largest gradient is 0.2 … use a larger l2"):
        fit = worlds.fit_course(irl.MaxEntIRL(gradient="algorithm1", l2=0.0))
    assert not fit.converged
    assert fit.num_iterations < 100


def test_on_dry_ground_paths_and_causal_entropy_are_the_same_model() -> None:
    world, expert = irl.GridWorld(4), np.full(16, -2.0)
    expert[5] = -1.5
    policy = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=expert, discount=1.0)).policy
    shown = irl.sample_demonstrations(world, policy, num_episodes=50, rng=np.random.default_rng(0))
    reward = irl.LinearReward(features=np.eye(16))
    paths, causal = (fitter(l2=0.01).fit(world, reward, shown) for fitter in (irl.MaxEntIRL, irl.MaxCausalEntIRL))
    np.testing.assert_allclose(paths.weights, causal.weights, rtol=0, atol=1e-6)
    np.testing.assert_allclose(paths.policy[:15], causal.policy[:15], rtol=0, atol=1e-7)
