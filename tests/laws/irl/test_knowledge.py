"""What can be known from behaviour, as often as intervals say; and what preferences add, alone or beside it."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from posttrain import irl
from posttrain.irl.objectives import Dual
from posttrain.irl.preferences import JointObjective
from tests.support import irl_worlds as worlds
from tests.support.refusals import refused, warned

SEEDS = st.integers(0, 10_000)
few = settings(max_examples=25)


def test_at_discount_1_the_goal_is_the_one_weight_that_nothing_depends_on() -> None:
    report = irl.identifiability(worlds.course_fit(1.0))
    assert report.rank == 24
    assert np.flatnonzero(~report.identified).tolist() == [worlds.GOAL]
    assert np.abs(report.free[:, 0]).argmax() == worlds.GOAL


def test_with_a_discount_a_cost_of_steps_trades_off_against_the_worth_of_the_end() -> None:
    """c in every step is c/(1 - γ) in all; as much more at the end changes nothing: the direction (1, .., 1, 10)."""
    report = irl.identifiability(worlds.course_fit(0.9))
    assert report.rank == 24
    direction = np.where(np.arange(25) == worlds.GOAL, 10.0, 1.0)
    np.testing.assert_allclose(np.abs(report.free[:, 0]), direction / np.linalg.norm(direction), rtol=1e-6)
    assert not report.identified.any()


def test_the_reported_curvatures_are_those_of_the_dual_without_its_penalty() -> None:
    fit = worlds.course_fit(0.9, temperature=0.5, l2=0.01)
    expected = np.linalg.eigvalsh(fit.point.hessian - 0.01 * np.eye(25))
    np.testing.assert_allclose(irl.identifiability(fit).curvatures, expected[::-1], rtol=0, atol=1e-9 * expected[-1])


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_what_is_identified_does_not_depend_on_the_unit_of_features(unit) -> None:
    fitter = irl.MaxCausalEntIRL(discount=1.0, l2=1e-3 * unit**2, tolerance=1e-8 * unit)
    report = irl.identifiability(worlds.fit_course(fitter, irl.LinearReward(features=unit * np.eye(25))))
    assert report.rank == 24
    assert np.flatnonzero(~report.identified).tolist() == [worlds.GOAL]


@few
@given(seed=SEEDS, discount=st.sampled_from([0.8, 1.0]), place=st.sampled_from(["state", "state_action", "next_state"]))
def test_weights_move_along_free_directions_without_changing_any_policy_and_no_others(seed, discount, place) -> None:
    """Features with a copy, with a sum of two others, and with a constant more than full shaping can hide."""
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng)
    base = worlds.features_of(mdp, rng, place).features
    reward = irl.LinearReward(features=np.column_stack([base, base[:, 1], base[:, 1] + base[:, 2]]), on=place)
    fitter = irl.MaxCausalEntIRL(discount=discount, l2=1e-3)
    moments, _ = worlds.moments_of(fitter, mdp, reward, np.array([-4.0, 0.5, -0.5, 0.3, 0.2]))
    fit = fitter.fit_moments(mdp, reward, moments)
    report = irl.identifiability(fit)
    assert report.rank == 3
    assert report.identified.tolist() == [True, False, False, False, False]
    moved = fit.setting.plan(fit.weights + 0.1 * report.free @ rng.normal(size=2)).policy
    np.testing.assert_allclose(moved, fit.policy, rtol=0, atol=1e-7)
    for direction in np.linalg.svd(report.free.T)[2][2:]:
        assert np.abs(fit.setting.plan(fit.weights + 0.1 * direction).policy - fit.policy).max() > 1e-5


@few
@given(seed=SEEDS, discount=st.sampled_from([0.9, 1.0]), l2=st.sampled_from([0.0, 1e-9]))
def test_the_unit_of_a_feature_decides_nothing(seed, discount, l2) -> None:
    """A column for each of a constant, two features, a copy of one in another unit, and nothing but zeros."""
    rng = np.random.default_rng(seed)
    mdp = worlds.random_world(rng)
    base = worlds.features_of(mdp, rng, "state_action").features
    columns, truth = np.column_stack([base, base[:, 1], np.zeros(18)]), np.array([-4.0, 0.5, -0.5, 0.0, 0.0])
    units = np.array([1.0, 1e6, 1e-6, 1e3, 1.0])
    fitter = irl.MaxCausalEntIRL(discount=discount, l2=l2)
    plain, scaled = (irl.LinearReward(features=columns * unit, on="state_action") for unit in (1.0, units))
    moments, policy = worlds.moments_of(fitter, mdp, plain, truth)
    fits = [fitter.fit_moments(mdp, plain, moments), fitter.fit_moments(mdp, scaled, moments * units)]
    assert all(fit.converged and fit.num_iterations < 30 for fit in fits)
    walks = irl.sample_demonstrations(mdp, policy, num_episodes=50, rng=rng)
    for fit, unit in zip(fits, (1.0, units), strict=True):
        report = irl.identifiability(fit)
        assert report.rank == 3
        assert report.identified.tolist() == [True, False, True, False, False]
        np.testing.assert_allclose(report.free.T @ report.free, np.eye(2), rtol=0, atol=1e-12)
        assert np.abs(columns * unit @ report.free).max() < 1e-6
        intervals = irl.confidence_intervals(fit, walks)
        assert np.isinf(intervals.low).tolist() == [False, True, False, True, True]
        if l2 == 0:
            reach = (intervals.high - intervals.low)[[0, 2]] * (np.ones(5) * unit)[[0, 2]]
            first = irl.confidence_intervals(fits[0], walks)
            np.testing.assert_allclose(reach, (first.high - first.low)[[0, 2]], rtol=1e-5)


def test_the_likelihood_identifies_what_was_chosen_even_where_no_reward_is_carried_back_to_the_start() -> None:
    """At discount 0 the dual sees first steps only; the actions of later ones say what the later states are about.

    0 leads to 1, whatever is done; in 1 action 1 earns the feature; both actions lead to the end.
    """
    table = np.zeros((3, 2, 3))
    table[0, :, 1] = table[1, :, 2] = 1
    mdp, reward = worlds.of_table(table, ends=[2]), irl.LinearReward(features=np.eye(6)[:, [3]], on="state_action")
    walks = irl.Demonstrations.from_transitions([[(0, 0, 1), (1, 1, 2)]] * 3 + [[(0, 0, 1), (1, 0, 2)]])
    dual, likelihood = (
        irl.MaxCausalEntIRL(objective=objective, discount=0.0, l2=0.0).fit(mdp, reward, walks)
        for objective in ("dual", "likelihood")
    )
    assert not irl.identifiability(dual).identified.any()
    assert irl.identifiability(likelihood).identified.all()
    # Three of four took it: θ = log 3, with the variance 1/(n p (1 - p)) = 1/(4 · 3/4 · 1/4) of a logit.
    assert likelihood.weights[0] == pytest.approx(np.log(3))
    intervals = irl.confidence_intervals(likelihood, walks, level=0.95)
    assert intervals.high[0] - intervals.low[0] == pytest.approx(2 * 1.959964 * (4 / 3) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("objective", ["dual", "likelihood", "joint"])
def test_intervals_cover_the_truth_as_often_as_they_say(objective) -> None:
    """60 data sets of 200 episodes: of intervals at level .8, between .66 and .94 cover (2.7 standard errors)."""
    rng = np.random.default_rng(7)
    mdp = worlds.random_world(rng)
    reward = irl.LinearReward(features=np.column_stack([np.ones(18), 2 * rng.normal(size=(18, 2))]), on="state_action")
    truth = np.array([-1.0, 0.6, -0.4])
    num_episodes = 60 if objective == "joint" else 200
    fitter = irl.MaxCausalEntIRL(objective="dual" if objective == "joint" else objective, discount=0.9, l2=1e-9)
    policy = fitter.setting(reward.bound(mdp), mdp.start).plan(truth).policy
    covered = np.zeros(3)
    for _ in range(60):
        walks = irl.sample_demonstrations(mdp, policy, num_episodes=num_episodes, rng=rng)
        if objective == "joint":
            episodes = [*worlds.aimless(mdp, 400, rng, max_steps=4)]
            judged = worlds.preferred(episodes, reward.bound(mdp), truth, 0.9, rng)
            fit = irl.fit_jointly(fitter, mdp, reward, walks, judged)
        else:
            fit = fitter.fit(mdp, reward, walks)
        intervals = irl.confidence_intervals(fit, walks, level=0.8)
        covered += (intervals.low <= truth) & (truth <= intervals.high)
    assert np.all(np.abs(covered / 60 - 0.8) <= 0.14)


@pytest.mark.parametrize("objective", ["dual", "likelihood"])
@pytest.mark.parametrize("l2", [1e-9, 0.05])
def test_intervals_of_one_choice_are_those_of_its_frequency(objective, l2) -> None:
    """In two states one may take a feature or leave it: p = σ(θ/τ), of which 30 of 100 episodes have it.

    dual         H = p (1 - p)/τ + l2      J = .3 (1 - p)² + .7 p²
    likelihood   H = p (1 - p)/τ² + l2     J = p (1 - p)/τ²

    and the deviation is √(J/100)/H.  The second state has the feature five times over whatever one does: that is where
    episodes start and no surprise.
    """
    mdp = worlds.of_table(np.tile(np.eye(3)[2], (3, 2, 1)), start=[0.5, 0.5, 0.0], ends=[2])
    reward = irl.LinearReward(features=np.array([[1.0], [0], [6], [5], [0], [0]]), on="state_action")
    walks, tau = irl.Demonstrations.from_transitions([[(n % 2, int(n >= 30), 2)] for n in range(100)]), 0.5
    fit = irl.MaxCausalEntIRL(objective=objective, discount=0.9, temperature=tau, l2=l2).fit(mdp, reward, walks)
    p = fit.policy[0, 0]
    bend, spread = {
        "dual": (p * (1 - p) / tau + l2, 0.3 * (1 - p) ** 2 + 0.7 * p**2),
        "likelihood": (p * (1 - p) / tau**2 + l2, p * (1 - p) / tau**2),
    }[objective]
    intervals = irl.confidence_intervals(fit, walks, level=0.8)
    reach = 1.2815515655446004 * np.sqrt(spread / 100) / bend  # a tenth of the normal distribution lies beyond 1.28
    assert intervals.low == pytest.approx(fit.weights - reach, rel=1e-6)
    assert intervals.high == pytest.approx(fit.weights + reach, rel=1e-6)
    assert (abs(fit.weights[0] - tau * np.log(3 / 7)) < 1e-6) == (l2 < 1e-3), "the log-odds, but for the penalty"


def test_what_is_not_identified_has_no_bounded_interval() -> None:
    fit, shown = worlds.course_fit(1.0), worlds.course_demonstrations()
    intervals = irl.confidence_intervals(fit, shown)
    assert (intervals.low[worlds.GOAL], intervals.high[worlds.GOAL]) == (-np.inf, np.inf)
    assert np.isfinite(np.delete(intervals.low, worlds.GOAL)).all()
    for level in (95.0, 1.0, 0.0):
        with refused(f"level = {level}"):
            irl.confidence_intervals(fit, shown, level=level)


@pytest.mark.parametrize("objective", ["dual", "likelihood"])
def test_intervals_are_those_of_the_demonstrations_that_were_fitted(objective) -> None:
    fit, shown = worlds.course_fit(0.9, objective=objective), [*worlds.course_demonstrations()]
    for others in (shown * 10, shown[:-1], shown[1:] + shown[1:2]):
        with refused("demonstrations are not the 200 of the fit"):
            irl.confidence_intervals(fit, irl.Demonstrations.from_episodes(others))


# From the middle of three states in a row to either end of a 3 × 3 grid's first row.
RIGHT, LEFT = irl.Episode([1, 2], [0], False, True), irl.Episode([1, 0], [1], False, True)
GRID = irl.GridWorld(3)


RIGHTWARD = irl.LinearReward(features=3 * np.repeat(np.eye(4)[None, :, :1], 9, axis=0), on="state_action")
"""A feature of going right, 3 in size."""


def compared(num_right: int, num_left: int) -> tuple[irl.Demonstrations, irl.Demonstrations]:
    """So many who preferred the one, and so many the other."""
    wins, others = [RIGHT] * num_right + [LEFT] * num_left, [LEFT] * num_right + [RIGHT] * num_left
    return irl.Demonstrations.from_episodes(wins), irl.Demonstrations.from_episodes(others)


@pytest.mark.parametrize("solver", ["auto", "lbfgs"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_one_choice_has_the_log_odds_of_its_frequency(temperature, solver) -> None:
    """σ(3 θ/τ) = 7/10, so θ = τ/3 · log(7/3); and the mean log-likelihood is .7 log .7 + .3 log .3."""
    fitter = irl.MaxCausalEntIRL(l2=0.0, temperature=temperature, solver=solver)
    fit = irl.fit_preferences(fitter, GRID, RIGHTWARD, compared(7, 3))
    assert fit.converged
    assert fit.weights[0] == pytest.approx(temperature / 3 * np.log(7 / 3), abs=1e-7)
    assert fit.log_likelihood == pytest.approx(0.7 * np.log(0.7) + 0.3 * np.log(0.3), rel=1e-9)
    assert fit.agreement == 0.7
    np.testing.assert_allclose(fit.reward[:, 0], 3 * fit.weights[0])


def test_a_discount_and_a_penalty_count_as_in_a_fit_of_demonstrations() -> None:
    """At the minimum l2 θ is the mean of σ(-θ Δφ) Δφ; here the feature is earned on the second step, worth γ."""
    paths = irl.Episode([4, 1, 2], [3, 0], False, True), irl.Episode([4, 1, 0], [3, 1], False, True)
    comparisons = tuple(irl.Demonstrations.from_episodes([path]) for path in paths)
    fit = irl.fit_preferences(irl.MaxCausalEntIRL(discount=0.5, l2=0.1), GRID, RIGHTWARD, comparisons)
    theta, difference = fit.weights[0], 3 * 0.5
    assert 0.1 * theta == pytest.approx(difference / (1 + np.exp(theta * difference)), abs=1e-7)


def test_sampled_preferences_give_back_the_weights_behind_them() -> None:
    rng, truth = np.random.default_rng(0), np.array([1.0, -2.0])
    mdp = worlds.random_world(rng)
    reward = irl.LinearReward(features=rng.normal(size=(18, 2)), on="state_action")
    episodes = [*worlds.aimless(mdp, 6000, rng, max_steps=3)]
    compared = worlds.preferred(episodes, reward.bound(mdp), truth, 0.9, rng)
    seen: list[float] = []
    fitter = irl.MaxCausalEntIRL(discount=0.9, l2=1e-6)
    fit = irl.fit_preferences(fitter, mdp, reward, compared, watch=lambda n: seen.append(n["objective"]))
    np.testing.assert_allclose(fit.weights, truth, rtol=0, atol=0.2)
    assert irl.identifiability(fit).identified.all()
    assert seen[-1] < seen[0]


def test_what_all_paths_have_alike_is_not_identified() -> None:
    features = np.concatenate([np.ones((9, 4, 1)), RIGHTWARD.features], axis=2)
    reward = irl.LinearReward(features=features, on="state_action")
    fit = irl.fit_preferences(irl.MaxCausalEntIRL(l2=1e-3), GRID, reward, compared(7, 3))
    assert irl.identifiability(fit).identified.tolist() == [False, True]


def test_preferences_without_a_contradiction_have_no_finite_weights() -> None:
    with warned("larger ones order all comparisons more surely; use l2 > 0", kind=irl.ConvergenceWarning):
        fit = irl.fit_preferences(irl.MaxCausalEntIRL(l2=0.0), GRID, RIGHTWARD, compared(7, 0))
    assert not fit.converged
    assert irl.fit_preferences(irl.MaxCausalEntIRL(l2=0.1), GRID, RIGHTWARD, compared(7, 0)).converged


def test_the_likelihood_of_actions_is_no_objective_of_preferences() -> None:
    with refused("use objective='dual'"):
        irl.fit_preferences(irl.MaxCausalEntIRL(objective="likelihood"), GRID, RIGHTWARD, compared(7, 3))


def test_a_comparison_weighs_as_much_as_a_demonstration() -> None:
    """Of N demonstrations the dual is τ/N times a negative log-likelihood, and so is what a comparison adds."""
    rng, fitter = np.random.default_rng(0), irl.MaxCausalEntIRL(discount=0.9, temperature=0.5)
    dual = Dual(fitter.setting(irl.LinearReward(features=np.eye(9)).bound(GRID), GRID.start), rng.normal(size=9))
    weights, differences = rng.normal(size=9), rng.normal(size=(4, 9))
    added = JointObjective(dual, differences, 20).at(weights).value - dual.at(weights).value
    assert added == pytest.approx(0.5 / 20 * np.log1p(np.exp(-differences @ weights / 0.5)).sum(), rel=1e-9)


def test_one_theta_explains_both_walks_and_preferences_between_paths() -> None:
    """In a deterministic world the log-odds of two whole paths from one start are those of Bradley and Terry."""
    reward = -2 - 0.2 * np.arange(9.0)
    plan = irl.soft_policy_iteration(irl.Problem(mdp=GRID, reward=reward, discount=1.0, temperature=0.7))
    paths = [(0, 0), (1, 0), (2, 2), (5, 2)], [(0, 2), (3, 3), (0, 0), (1, 2), (4, 2), (7, 0)]
    chance, other = (sum(np.log(plan.policy[step]) for step in path) for path in paths)
    gain = sum(reward[s] for s, _ in paths[0]) - sum(reward[s] for s, _ in paths[1])
    assert chance - other == pytest.approx(gain / 0.7, rel=1e-9)


def test_preferences_settle_what_demonstrations_cannot() -> None:
    """Two ends, each with a feature, reached from separate starts: demonstrations never compare them with a step.

    Every episode ends once, so at discount 1 the demonstrations leave the ends' common worth open; comparisons of
    episodes from one start, some of which were cut off before the end, fix it.
    """
    features = np.column_stack([np.arange(9) < 8, np.arange(9) == 8, np.arange(9) == 4]).astype(float)
    reward, truth = irl.LinearReward(features=features), np.array([-2.0, 3.0, 0.5])
    fitter, rng = irl.MaxCausalEntIRL(discount=1.0, l2=1e-3), np.random.default_rng(1)
    policy = fitter.setting(reward.bound(GRID), GRID.start).plan(truth).policy
    walks = irl.sample_demonstrations(GRID, policy, num_episodes=300, rng=0)
    alone = fitter.fit(GRID, reward, walks)
    assert abs(alone.weights[1]) < 1e-6  # the goal: not identified
    sampled = (irl.sample_demonstrations(GRID, policy, num_episodes=400, rng=rng, max_steps=n) for n in (2, 3, 4, 5))
    cut = [episode for some in sampled for episode in some]
    comparisons = worlds.preferred(cut, reward.bound(GRID), truth, 1.0, rng)
    joint = irl.fit_jointly(fitter, GRID, reward, walks, comparisons)
    assert joint.converged
    np.testing.assert_allclose(joint.weights, truth, rtol=0, atol=0.4)
    assert not irl.identifiability(alone).identified[1]
    assert irl.identifiability(joint).identified.all()
    intervals = irl.confidence_intervals(joint, walks, level=0.99)
    assert np.all((intervals.low < truth) & (truth < intervals.high))
    assert np.all(intervals.high - intervals.low < 1.5)
    turned = irl.fit_jointly(fitter, GRID, reward, walks, comparisons[::-1])
    assert turned.weights[1] < joint.weights[1] - 1


ONE, TWO = [(7, 0, 8)], [(5, 2, 8)]


@pytest.mark.parametrize(
    ("fitter", "shown", "wins", "others", "words"),
    [
        ({}, [ONE], [ONE], [TWO], "comparison 0 starts in states 7 and 5"),
        ({}, [ONE], [ONE, TWO], [ONE], "2 preferred episodes for 1 others"),
        ({}, [[(4, 0, 5)]], [ONE], [ONE], "demonstration 0 was truncated in state 5"),
        ({"objective": "likelihood"}, [ONE], [ONE], [ONE], "use objective='dual'"),
        ({"horizon": 2}, [ONE], [ONE], [[(7, 1, 6), (6, 0, 7), *ONE]], "other … comparison 0 has 3 actions; the hor"),
    ],
)
def test_comparisons_that_do_not_pair_up_are_refused(fitter, shown, wins, others, words) -> None:
    grid, reward = irl.GridWorld(3, start=np.full(9, 1 / 9)), irl.LinearReward(features=np.eye(9))
    walks, *compared = (
        irl.Demonstrations.from_transitions(each, terminated=each[0][-1][-1] == 8) for each in (shown, wins, others)
    )
    with refused(words):
        irl.fit_jointly(irl.MaxCausalEntIRL(**fitter), grid, reward, walks, tuple(compared))
