"""What can and cannot be known from behaviour: free directions, and intervals that cover as often as they say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import irl
from tests.support import irl_worlds as worlds
from tests.support.refusals import refused

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
def test_weights_move_along_free_directions_without_changing_any_policy_and_along_no_other(
    seed, discount, place
) -> None:
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
            compared = worlds.preferred(
                [*worlds.aimless(mdp, 400, rng, max_steps=4)], reward.bound(mdp), truth, 0.9, rng
            )
            fit = irl.fit_jointly(fitter, mdp, reward, walks, compared)
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
    assert intervals.low[worlds.GOAL] == -np.inf
    assert intervals.high[worlds.GOAL] == np.inf
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
