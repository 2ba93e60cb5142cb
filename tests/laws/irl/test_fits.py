"""What a fit promises: it matches what can be matched, certifies it, and says what it cannot know."""

import time

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.sparse import csr_array, eye_array

from posttrain import irl
from posttrain.irl.counting import visit_totals
from posttrain.irl.fitting import visit_error
from tests.support import irl_worlds as worlds
from tests.support.refusals import refused, warned

SEEDS = st.integers(0, 10_000)
GRID, PER_CELL = irl.GridWorld(3), irl.LinearReward(features=np.eye(9))


def test_on_the_courses_demonstrations_it_comes_as_near_as_the_bound_allows() -> None:
    fit = worlds.course_fit(1.0, l2=1e-3)
    visits = irl.occupancy(worlds.course_world(), fit.policy, discount=1.0)
    gap = np.abs(visits - visit_totals(worlds.course_demonstrations(), 25)).max()
    assert fit.converged
    assert gap == pytest.approx(fit.gap, abs=1e-9)
    assert gap <= 0.0245
    bound = irl.smallest_gap(fit.setting, fit.moments)
    assert bound == pytest.approx(0.0226, abs=5e-5)
    assert bound <= gap
    # At discount 1 every episode reaches the goal once, whatever is paid there: only the penalty says 0.
    assert sorted(np.argsort(fit.weights)[-2:].tolist()) == [worlds.SIDE_PRIZE, 12]
    assert abs(fit.weights[worlds.GOAL]) < 1e-6


def test_with_a_discount_the_two_prizes_come_out_on_top() -> None:
    fit = worlds.course_fit(0.9, l2=1e-3)
    assert np.argsort(fit.weights)[-2:].tolist() == [worlds.SIDE_PRIZE, worlds.GOAL]


@pytest.mark.parametrize("solver", ["newton", "lbfgs"])
@pytest.mark.parametrize("discount", [0.99, 1.0])
@pytest.mark.parametrize("name", ["FrozenLake", "CliffWalking", "Taxi"])
def test_exact_moments_of_gymnasiums_worlds_are_matched(name, discount, solver) -> None:
    env = gymnasium.make(worlds.newest(name), **({"map_name": "8x8"} if "Lake" in name else {}))
    mdp, rng = irl.read_gymnasium(env), np.random.default_rng(0)
    if name == "Taxi":  # a step, a wrong pick-up or delivery, a right delivery
        features = np.stack([mdp.rewards == worth for worth in (-1, -10, 20)], axis=2).astype(float)
        reward, weights = irl.LinearReward(features=features, on="state_action"), np.array([-2.0, -2.0, 4.0])
    else:
        reward, weights = irl.LinearReward(features=np.eye(mdp.num_states)), -2 + 0.3 * rng.normal(size=mdp.num_states)
    fitter = irl.MaxCausalEntIRL(discount=discount, l2=0.0, solver=solver)
    policy, fit = worlds.refitted(fitter, mdp, reward, weights)
    seen = irl.occupancy(mdp, policy, discount=discount) > 1e-3
    np.testing.assert_allclose(fit.policy[seen], policy[seen], rtol=0, atol=1e-2 if solver == "lbfgs" else 1e-6)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    place=st.sampled_from(["state", "state_action", "next_state"]),
    discount=st.sampled_from([0.9, 1.0]),
    horizon=st.sampled_from([None, 6]),
    temperature=st.sampled_from([0.5, 2.0]),
)
def test_what_a_policy_can_do_is_matched_and_its_policy_found(seed, place, discount, horizon, temperature) -> None:
    """Among them the case in which imitation 1.0.1 forgets the discount of the policy that it returns."""
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng)
    weights = temperature * np.array([-4.0, 0.5, -0.5])
    fitter = irl.MaxCausalEntIRL(discount=discount, horizon=horizon, temperature=temperature, l2=0.0)
    policy, fit = worlds.refitted(fitter, mdp, worlds.features_of(mdp, rng, place), weights)
    np.testing.assert_allclose(fit.policy, policy, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", [2, 3])
def test_lbfgs_matches_exact_moments_of_a_lake_whose_weights_count_unequally(seed) -> None:
    """At discount .99 a state by the way counts a thousand times one beyond the holes."""
    mdp = irl.read_gymnasium(gymnasium.make(worlds.newest("FrozenLake"), map_name="8x8"))
    fitter = irl.MaxCausalEntIRL(discount=0.99, l2=0.0, solver="lbfgs")
    weights = np.random.default_rng(seed).normal(size=64)
    worlds.refitted(fitter, mdp, irl.LinearReward(features=np.eye(64)), weights, within=1e-7)


def test_the_gap_belongs_to_the_policy_that_is_returned() -> None:
    """Measured by walking: 5,000 episodes of the policy visit states as often as the fit says."""
    fit = worlds.fit_course(irl.MaxCausalEntIRL())
    walked = irl.sample_demonstrations(worlds.course_world(), fit.policy, num_episodes=5000, rng=5)
    seen = visit_totals(walked, 25)
    assert np.abs(seen - fit.expected).max() < 0.06  # five standard errors of the most visited state
    assert abs(seen.sum() - fit.expected.sum()) < 0.15


def test_the_returned_gap_error_covers_what_rounding_did() -> None:
    grid = irl.IcyGridWorld(30, slip=0.2)
    fitter = irl.MaxCausalEntIRL(l2=1e-3, discount=1.0)
    tiles = irl.tiles(30, 10)
    fit = fitter.fit_moments(grid, irl.LinearReward(features=tiles), tiles.T @ np.full(900, 0.2))
    visits, flow = fit.setting.start.copy(), fit.setting.start.copy()
    for _ in range(200_000):  # the same expectation as a plain sum over time
        flow = grid.backward @ (fit.policy * flow[:, None]).ravel()
        visits += flow
        if flow.sum() < 1e-18:
            break
    assert 0 < fit.gap_error < 1e-7
    assert np.abs(tiles.T @ visits - fit.expected).max() <= fit.gap_error + 1e-10


@settings(max_examples=20)
@given(seed=SEEDS, discount=st.sampled_from([0.7, 1.0]), state=st.integers(0, 5))
def test_an_error_planted_in_the_visits_of_a_state_is_covered(seed, discount, state) -> None:
    """One visit of s too many leaves over 1 - γ P(s|s) there and γ P(s'|s) elsewhere; the longest episode, discounted,
    has max_s Σ_t γᵗ states, the last included."""
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng)
    setting = irl.MaxCausalEntIRL(discount=discount).setting(irl.LinearReward(features=np.eye(6)).bound(mdp), mdp.start)
    plan = setting.plan(np.full(6, -3.0))
    visits = plan.visits(setting.start)
    assert visit_error(plan, visits, setting) < 1e-12
    going = discount * np.einsum("sa,san->sn", plan.policy, worlds.dense_transitions(mdp))
    longest = np.linalg.solve(np.eye(6) - going, np.ones(6)).max()
    left_over = np.eye(6)[state] - going[state]
    error = visit_error(plan, visits + np.eye(6)[state], setting)
    assert error == pytest.approx(np.abs(left_over).sum() * longest, rel=1e-9)
    assert error >= 1


@pytest.mark.parametrize("horizon", [None, 50])
@pytest.mark.parametrize("objective", ["dual", "likelihood"])
def test_newton_and_lbfgs_find_the_same_weights(objective, horizon) -> None:
    given = {"objective": objective, "horizon": horizon, "l2": 0.1}
    fits = [worlds.course_fit(0.95, solver=solver, **given) for solver in ("newton", "lbfgs")]
    assert all(fit.converged for fit in fits)
    np.testing.assert_allclose(*(fit.weights for fit in fits), rtol=0, atol=1e-6)


def test_the_likelihood_fits_actions_better_and_features_worse_than_the_dual() -> None:
    dual, likelihood = (worlds.course_fit(0.9, objective=objective) for objective in ("dual", "likelihood"))
    assert dual.gap < likelihood.gap
    assert dual.log_likelihood < likelihood.log_likelihood < 0
    # The expert's own likelihood is what a perfect fit would come to, up to the noise that it has fitted.
    policy, demonstrations = worlds.course_expert(), worlds.course_demonstrations()
    acted = policy[demonstrations.states[demonstrations.acting], demonstrations.actions]
    assert likelihood.log_likelihood == pytest.approx(float(np.log(acted).mean()), abs=0.03)


@pytest.mark.parametrize("horizon", [None, 40])
def test_the_log_likelihood_is_the_mean_over_demonstrated_steps(horizon) -> None:
    shown = worlds.course_demonstrations()
    fit = worlds.fit_course(irl.MaxCausalEntIRL(horizon=horizon))
    states, times = shown.states[shown.acting], shown.visit_times[shown.acting]
    chosen = fit.policy[(states, shown.actions) if horizon is None else (times, states, shown.actions)]
    assert fit.log_likelihood == pytest.approx(float(np.log(chosen).mean()), rel=1e-9)


@pytest.mark.filterwarnings("ignore:no policy has these moments")
@pytest.mark.filterwarnings("ignore:the fit has not converged")
@settings(max_examples=20)
@given(seed=SEEDS, stop=st.integers(0, 4))
def test_the_objective_is_no_further_from_its_minimum_than_certified(seed, stop) -> None:
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng)
    reward, moments = worlds.features_of(mdp, rng), rng.normal(size=3) * 3
    early = irl.MaxCausalEntIRL(discount=0.9, l2=0.1, max_iterations=stop).fit_moments(mdp, reward, moments)
    whole = irl.MaxCausalEntIRL(discount=0.9, l2=0.1).fit_moments(mdp, reward, moments)
    assert early.point.value - whole.point.value <= early.suboptimality + 1e-9
    assert whole.suboptimality < 1e-12
    left_over = (whole.expected - whole.moments + 0.1 * whole.weights) / whole.setting.features.units
    np.testing.assert_allclose(left_over, 0, rtol=0, atol=1e-8)
    assert early.num_iterations == stop or early.converged


@pytest.mark.filterwarnings("ignore:the fit has not converged")
def test_where_only_the_penalty_bends_the_objective_the_certificate_is_exact() -> None:
    """Features that are all 0 leave -θ·μ + (l2/2)‖θ‖²: at θ = 0 it is ‖μ‖²/(2·l2) = 5/.2 above its minimum."""
    start, nothing = irl.MaxCausalEntIRL(discount=0.9, l2=0.1, max_iterations=0), np.zeros((9, 2))
    fit = start.fit_moments(GRID, irl.LinearReward(features=nothing), np.array([1.0, -2.0]))
    assert fit.suboptimality == pytest.approx(25)


@pytest.mark.filterwarnings("ignore:the fit has not converged")
def test_an_error_in_visits_counts_as_often_as_the_largest_feature() -> None:
    fitter = irl.MaxCausalEntIRL(discount=0.9, max_iterations=0)
    scaled = [irl.LinearReward(features=scale * np.eye(9)) for scale in (1, 1000)]
    small, large = (fitter.fit_moments(GRID, reward, np.zeros(9)).gap_error for reward in scaled)
    assert large == pytest.approx(1000 * small)


@settings(max_examples=25)
@given(seed=SEEDS, discount=st.sampled_from([0.9, 1.0]), place=st.sampled_from(["state", "state_action", "next_state"]))
def test_no_policy_comes_nearer_than_the_bound_and_what_is_possible_has_bound_zero(seed, discount, place) -> None:
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng, num_ends=2)
    reward, fitter = worlds.features_of(mdp, rng, place), irl.MaxCausalEntIRL(discount=discount)
    given_setting = fitter.setting(reward.bound(mdp), mdp.start)
    possible, _ = worlds.moments_of(fitter, mdp, reward, np.array([-4.0, 0.5, 0.5]))
    assert irl.smallest_gap(given_setting, possible) < 1e-9
    wanted = possible + rng.normal(size=3)
    bound = irl.smallest_gap(given_setting, wanted)
    for _ in range(20):
        policy = rng.dirichlet(np.full(3, 0.3), 6)
        visits = irl.occupancy(mdp, policy, discount=discount)
        acting = np.where(mdp.terminal[:, None], 0, policy * visits[:, None])
        totals = given_setting.features.totals(acting, np.where(mdp.terminal, visits, 0))
        assert np.abs(totals - wanted).max() >= bound - 1e-9


def test_moments_that_no_policy_has_end_with_a_warning_that_names_the_least_gap() -> None:
    """Each of 9 states visited 5 times: but the end is visited once at most, so there the gap is at least 4."""
    fitter = irl.MaxCausalEntIRL(discount=0.9, l2=0.0, max_iterations=200)
    with warned("not converged: … least that any policy can reach 4. … use l2 > 0"):
        fit = fitter.fit_moments(GRID, PER_CELL, np.full(9, 5.0))
    assert not fit.converged
    assert fit.gap >= irl.smallest_gap(fit.setting, fit.moments) >= 4
    with warned("not converged: … after 1 iterations; raise max_iterations"):
        worlds.fit_course(irl.MaxCausalEntIRL(max_iterations=1))


@pytest.mark.parametrize("horizon", [None, 20])
def test_moments_that_no_policy_has_are_told_with_a_penalty_too(horizon) -> None:
    """Episodes of the grid take 4 steps at least, and 250 visits of the start are more than any has by choice."""
    fitter = irl.MaxCausalEntIRL(discount=0.9, horizon=horizon)
    with warned("no policy has these moments: the gap is 2"):
        fitter.fit_moments(GRID, PER_CELL, 250.0 * np.eye(9)[8])


@pytest.mark.filterwarnings("error")
def test_a_gap_that_is_the_penaltys_is_no_reason_to_warn() -> None:
    weights = 2 * np.random.default_rng(0).normal(size=9)
    moments, _ = worlds.moments_of(irl.MaxCausalEntIRL(discount=0.9), GRID, PER_CELL, weights)
    fit = irl.MaxCausalEntIRL(discount=0.9, l2=1.0).fit_moments(GRID, PER_CELL, moments)
    assert fit.gap > 0.01 * np.abs(moments).max()


def test_with_a_horizon_duality_tells_how_near_any_policy_can_come() -> None:
    """Of 6 actions from the start the goal sees 1 visit at most and every state 7; each is asked for 5 times."""
    fitter = irl.MaxCausalEntIRL(discount=1.0, l2=0.0, horizon=6)
    with pytest.warns(UserWarning, match="no policy comes nearer than") as given:
        fit = fitter.fit_moments(GRID, PER_CELL, np.full(9, 5.0))
    told = float(str(given[0].message).split("nearer than ")[1].split(";")[0])
    assert 4 <= told <= fit.gap + 0.01
    assert fit.num_iterations < 1000


def test_nobody_goes_round_where_nobody_can_come() -> None:
    """From 0 to the end, 2; states 1 and 3 lead to each other, but nothing leads to them: they are never visited."""
    table = np.zeros((4, 2, 4))
    table[0, :, 2] = table[1, 0, 3] = table[1, 1, 2] = table[3, :, 1] = 1
    mdp = worlds.of_table(table, ends=[2])
    given_setting = irl.MaxCausalEntIRL().setting(irl.LinearReward(features=np.eye(4)).bound(mdp), mdp.start)
    assert irl.smallest_gap(given_setting, np.array([1.0, 5, 1, 5])) == pytest.approx(5)
    for moments in (np.ones(3), np.array([1.0, np.nan, 1, 5])):
        with refused("moments has"):
            irl.smallest_gap(given_setting, moments)


@pytest.mark.parametrize("discount", [0.9, 1.0])
def test_without_penalty_the_likelihood_has_finite_weights_where_the_dual_has_none(discount) -> None:
    """200 walks have visits that no policy has, but no choice that is always the same: only the dual runs away."""
    free, penalised = (worlds.course_fit(discount, objective="likelihood", l2=l2) for l2 in (0.0, 1e-3))
    assert free.converged
    assert np.abs(free.weights).max() < 100
    assert free.log_likelihood > penalised.log_likelihood
    assert penalised.suboptimality == float("inf")  # nothing is certified of what is not convex


def test_features_that_cannot_say_that_a_step_costs_are_an_error_at_discount_1() -> None:
    goal_only = np.eye(9)[:, [8]]
    with refused("add a feature that is 1 in every step", error=irl.Divergence):
        irl.MaxCausalEntIRL(discount=1.0).fit_moments(GRID, irl.LinearReward(features=goal_only), np.ones(1))
    endless = irl.GridWorld(3, terminal=())
    with refused("can never reach a terminal state, first 0", error=irl.Divergence):
        irl.MaxCausalEntIRL(discount=1.0).fit_moments(endless, PER_CELL, np.ones(9))


def test_a_start_is_found_where_only_some_steps_can_cost_anything() -> None:
    """0 → 1 by both actions; 1 → 0 by one, the end by the other; the one feature is whether one is in 0.

    At weight 0 going round for ever pays log 2 in entropy each time, and no weight makes steps from 1 cost anything;
    but the round can be made to cost: θ + W(1) - W(0) ≤ -c and W(0) - W(1) ≤ -c have the solutions θ ≤ -2 c.
    """
    table = np.zeros((3, 2, 3))
    table[0, :, 1] = table[1, 0, 0] = table[1, 1, 2] = 1
    mdp = worlds.of_table(table, ends=[2])
    reward = irl.LinearReward(features=np.array([[1.0], [0.0], [0.0]]))
    fitter = irl.MaxCausalEntIRL(discount=1.0, l2=0.0)
    with pytest.raises(irl.Divergence):
        worlds.moments_of(fitter, mdp, reward, np.zeros(1))
    # Visits of 0 are geometric: with mean 4/3 the policy in 1 goes back with probability 1/4.
    fit = fitter.fit_moments(mdp, reward, np.array([4 / 3]))
    assert fit.policy[1, 0] == pytest.approx(1 / 4, abs=1e-7)


@pytest.mark.parametrize("objective", ["dual", "likelihood"])
def test_a_fit_starts_where_the_demonstrations_start_and_not_where_the_world_does(objective) -> None:
    """The world starts anywhere; all demonstrations start in state 0, and a weight for each state can match them."""
    start = np.where(np.arange(25) == worlds.GOAL, 0, 1 / 24)
    world = irl.IcyGridWorld(5, slip=0.2, terminal=[worlds.GOAL], start=start)
    fitter = irl.MaxCausalEntIRL(objective=objective, l2=1e-3)
    fit = fitter.fit(world, worlds.PER_STATE, worlds.course_demonstrations())
    elsewhere = worlds.fit_course(fitter)
    assert fit.expected[0] > 1
    assert fit.gap == pytest.approx(elsewhere.gap, abs=1e-9)
    np.testing.assert_allclose(fit.weights, elsewhere.weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("on", "rows"), [("state", 25), ("state_action", 100), ("next_state", 25)])
def test_sparse_features_fit_as_dense_ones_do(on, rows) -> None:
    rng = np.random.default_rng(2)
    features = np.column_stack([np.ones(rows), rng.random((rows, 3)) * (rng.random((rows, 3)) < 0.5)])
    dense, sparse = (
        worlds.fit_course(irl.MaxCausalEntIRL(discount=0.9, l2=0.01), irl.LinearReward(features=kind(features), on=on))
        for kind in (np.array, csr_array)
    )
    np.testing.assert_allclose(dense.weights, sparse.weights, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("size", "options"), [(25, {"discount": 0.9}), (50, {"discount": 0.95, "solver": "lbfgs", "tolerance": 1e-6})]
)
def test_of_many_weights_a_fit_takes_no_second_derivatives(size, options) -> None:
    """A weight for each of 625 states and more: one Hessian costs what a hundred gradients do."""
    grid, weights = irl.IcyGridWorld(size, slip=0.2), 0.3 * np.random.default_rng(0).normal(size=size**2)
    reward, evaluations = irl.LinearReward(features=eye_array(size**2, format="csr")), []
    fitter = irl.MaxCausalEntIRL(l2=1e-2, **options)
    moments, _ = worlds.moments_of(fitter, grid, reward, weights)
    fit = fitter.fit_moments(grid, reward, moments, watch=evaluations.append)
    assert fit.converged
    assert fit.gap <= 1e-2 * np.abs(fit.weights).max() + 1e-6
    assert len(evaluations) > 30, "Newton's method takes about ten"


def test_demonstrations_of_any_length_need_no_padding_and_the_truncated_ones_only_likelihood() -> None:
    cut = irl.Demonstrations.from_episodes(
        irl.Episode(episode.states[:6], episode.actions[:5], terminated=False, truncated=True)
        for episode in worlds.course_demonstrations()
    )
    for fitter, shown, words in (
        (
            irl.MaxCausalEntIRL(discount=1.0),
            cut,
            "demonstration 0 was truncated in state … after 5 actions: at discount 1.0",
        ),
        (irl.MaxEntIRL(), cut, "demonstration 0 was truncated"),
        (irl.MaxCausalEntIRL(discount=0.9, horizon=9), cut, "the horizon of 9"),
        (irl.MaxCausalEntIRL(horizon=9), None, "demonstration … actions; the horizon is 9"),
    ):
        with refused(words):
            worlds.fit_course(fitter, shown=shown)
    with warned("200 of 200 demonstrations are truncated: … has 59% of the weight"):
        worlds.fit_course(irl.MaxCausalEntIRL(discount=0.9), shown=cut)  # .9⁵ = .59
    assert worlds.fit_course(irl.MaxCausalEntIRL(horizon=5), shown=cut).gap < 0.05
    fit = worlds.fit_course(irl.MaxCausalEntIRL(objective="likelihood", discount=1.0), shown=cut)
    assert fit.log_likelihood > -0.25  # its top is flat: whether the search ends by its tolerance is up to rounding


def test_a_large_grid_plans_in_seconds() -> None:
    """316 × 316; the figures are in benchmarks/irl.py, here only that nothing is dense or quadratic."""
    begun = time.perf_counter()
    grid = irl.IcyGridWorld(316, slip=0.2)
    plan = irl.soft_policy_iteration(irl.Problem(mdp=grid, reward=np.full(99856, -1.5), discount=0.9))
    assert np.isfinite(plan.values).all()
    assert time.perf_counter() - begun < 60
