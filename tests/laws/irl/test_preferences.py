"""Preferences alone find the reward behind them: in closed form, as a minimum, and from samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import irl
from posttrain.irl.objectives import Dual
from posttrain.irl.preferences import JointObjective, PreferenceObjective
from tests.support.irl_worlds import random_world, slopes
from tests.support.refusals import refused, warned

# From the middle of three states in a row to either end of a 3 × 3 grid's first row.
RIGHT, LEFT = irl.Episode([1, 2], [0], False, True), irl.Episode([1, 0], [1], False, True)
GRID = irl.GridWorld(3)


def on_the_right() -> irl.LinearReward:
    """A feature of going right, 3 in size."""
    features = np.zeros((9, 4, 1))
    features[:, 0] = 3
    return irl.LinearReward(features=features, on="state_action")


def compared(num_right: int, num_left: int) -> tuple[irl.Demonstrations, irl.Demonstrations]:
    """So many who preferred the one, and so many the other."""
    wins, others = [RIGHT] * num_right + [LEFT] * num_left, [LEFT] * num_right + [RIGHT] * num_left
    return irl.Demonstrations.from_episodes(wins), irl.Demonstrations.from_episodes(others)


@pytest.mark.parametrize("solver", ["auto", "lbfgs"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_one_choice_has_the_log_odds_of_its_frequency(temperature, solver) -> None:
    """σ(3 θ/τ) = 7/10, so θ = τ/3 · log(7/3); and the mean log-likelihood is .7 log .7 + .3 log .3."""
    fitter = irl.MaxCausalEntIRL(l2=0.0, temperature=temperature, solver=solver)
    fit = irl.fit_preferences(fitter, GRID, on_the_right(), compared(7, 3))
    assert fit.converged
    assert fit.weights[0] == pytest.approx(temperature / 3 * np.log(7 / 3), abs=1e-7)
    assert fit.log_likelihood == pytest.approx(0.7 * np.log(0.7) + 0.3 * np.log(0.3), rel=1e-9)
    assert fit.agreement == 0.7
    np.testing.assert_allclose(fit.reward[:, 0], 3 * fit.weights[0])


def test_a_discount_and_a_penalty_count_as_in_a_fit_of_demonstrations() -> None:
    """At the minimum l2 θ is the mean of σ(-θ Δφ) Δφ; here the feature is earned on the second step, worth γ."""
    paths = irl.Episode([4, 1, 2], [3, 0], False, True), irl.Episode([4, 1, 0], [3, 1], False, True)
    comparisons = tuple(irl.Demonstrations.from_episodes([path]) for path in paths)
    fit = irl.fit_preferences(irl.MaxCausalEntIRL(discount=0.5, l2=0.1), GRID, on_the_right(), comparisons)
    theta, difference = fit.weights[0], 3 * 0.5
    assert 0.1 * theta == pytest.approx(difference / (1 + np.exp(theta * difference)), abs=1e-7)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), temperature=st.sampled_from([0.5, 2.0]))
def test_its_derivatives_are_finite_differences_and_those_of_a_joint_fit(seed, temperature) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng)
    features = irl.LinearReward(features=np.column_stack([np.ones(6), rng.normal(size=(6, 2))])).bound(mdp)
    setting = irl.MaxCausalEntIRL(discount=0.9, temperature=temperature, l2=0.3).setting(features, mdp.start)
    alone, weights = PreferenceObjective(setting, 3 * rng.normal(size=(8, 3))), rng.normal(size=3)
    point = alone.at(weights)
    gradient = slopes(lambda w: np.array(alone.at(w).value), weights)
    np.testing.assert_allclose(point.gradient, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())
    hessian = slopes(lambda w: alone.at(w).gradient, weights)
    np.testing.assert_allclose(point.hessian, hessian, rtol=0, atol=1e-6 * np.abs(hessian).max())
    dual = Dual(setting, rng.normal(size=3))
    joint = JointObjective(dual, alone.differences, 8).at(weights)
    parts = dual.at(weights).gradient + point.gradient - 0.3 * weights  # the penalty counts once
    np.testing.assert_allclose(joint.gradient, parts, rtol=1e-9, atol=1e-12)


def test_sampled_preferences_give_back_the_weights_behind_them() -> None:
    rng, truth = np.random.default_rng(0), np.array([1.0, -2.0])
    mdp = random_world(rng)
    reward = irl.LinearReward(features=rng.normal(size=(18, 2)), on="state_action")
    uniform = np.full((6, 3), 1 / 3)
    episodes = [*irl.sample_demonstrations(mdp, uniform, num_episodes=6000, rng=rng, max_steps=3)]
    by_start = [[episode for episode in episodes if episode.states[0] == state] for state in (0, 1)]
    pairs = [pair for same in by_start for pair in zip(same[::2], same[1::2], strict=False)]
    totals = [
        reward.bound(mdp).per_episode(irl.Demonstrations.from_episodes(side), 0.9) @ truth
        for side in zip(*pairs, strict=True)
    ]
    first = rng.random(len(pairs)) < 1 / (1 + np.exp(totals[1] - totals[0]))
    wins = irl.Demonstrations.from_episodes(pair[int(not one)] for pair, one in zip(pairs, first, strict=True))
    others = irl.Demonstrations.from_episodes(pair[int(one)] for pair, one in zip(pairs, first, strict=True))
    seen: list[float] = []
    fit = irl.fit_preferences(
        irl.MaxCausalEntIRL(discount=0.9, l2=1e-6),
        mdp,
        reward,
        (wins, others),
        watch=lambda n: seen.append(n["objective"]),
    )
    np.testing.assert_allclose(fit.weights, truth, rtol=0, atol=0.2)
    assert irl.identifiability(fit).identified.all()
    assert seen[-1] < seen[0]


def test_what_all_paths_have_alike_is_not_identified() -> None:
    features = np.concatenate([np.ones((9, 4, 1)), on_the_right().features], axis=2)
    fit = irl.fit_preferences(
        irl.MaxCausalEntIRL(l2=1e-3), GRID, irl.LinearReward(features=features, on="state_action"), compared(7, 3)
    )
    assert irl.identifiability(fit).identified.tolist() == [False, True]


def test_preferences_without_a_contradiction_have_no_finite_weights() -> None:
    with warned("larger ones order all comparisons more surely; use l2 > 0", kind=irl.ConvergenceWarning):
        fit = irl.fit_preferences(irl.MaxCausalEntIRL(l2=0.0), GRID, on_the_right(), compared(7, 0))
    assert not fit.converged
    assert irl.fit_preferences(irl.MaxCausalEntIRL(l2=0.1), GRID, on_the_right(), compared(7, 0)).converged


def test_the_likelihood_of_actions_is_no_objective_of_preferences() -> None:
    with refused("use objective='dual'"):
        irl.fit_preferences(irl.MaxCausalEntIRL(objective="likelihood"), GRID, on_the_right(), compared(7, 3))
