"""Preferences find the reward behind them, alone or beside demonstrations: in closed form and from samples."""

import numpy as np
import pytest

from posttrain import irl
from posttrain.irl.objectives import Dual
from posttrain.irl.preferences import JointObjective
from tests.support import irl_worlds as worlds
from tests.support.refusals import refused, warned

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
    chances, returns = (
        [sum(of(s, a) for s, a in path) for path in paths]
        for of in (lambda s, a: np.log(plan.policy[s, a]), lambda s, a: reward[s])
    )
    assert chances[0] - chances[1] == pytest.approx((returns[0] - returns[1]) / 0.7, rel=1e-9)


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
    cut = [
        episode
        for steps in (2, 3, 4, 5)
        for episode in irl.sample_demonstrations(GRID, policy, num_episodes=400, rng=rng, max_steps=steps)
    ]
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
        (
            {"horizon": 2},
            [ONE],
            [ONE],
            [[(7, 1, 6), (6, 0, 7), (7, 0, 8)]],
            "other episode of comparison 0 has 3 actions; the horizon is 2",
        ),
    ],
)
def test_comparisons_that_do_not_pair_up_are_refused(fitter, shown, wins, others, words) -> None:
    grid, reward = irl.GridWorld(3, start=np.full(9, 1 / 9)), irl.LinearReward(features=np.eye(9))
    walks, *compared = (
        irl.Demonstrations.from_transitions(each, terminated=each[0][-1][-1] == 8) for each in (shown, wins, others)
    )
    with refused(words):
        irl.fit_jointly(irl.MaxCausalEntIRL(**fitter), grid, reward, walks, tuple(compared))
