"""How a fit goes on: by which solver, what it shows meanwhile, and how it says that it has not converged."""

import warnings
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.divergence import ConvergenceWarning
from posttrain.irl.features import LinearReward
from posttrain.irl.fitting import Fit
from posttrain.irl.grids import GridWorld, IcyGridWorld
from posttrain.irl.gymnasium_table import read_gymnasium
from posttrain.irl.maxent import MaxEntIRL, PathFit
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Watch
from posttrain.irl.preferences import fit_jointly
from tests.support.irl_worlds import course_demonstrations, course_world, newest
from tests.support.refusals import warned

ONE_WEIGHT_PER_STATE = LinearReward(features=np.eye(25))
VISITS = np.full(25, 2.0)

Fitter = Callable[[MaxCausalEntIRL, Watch | None], Fit]


def to_demonstrations(irl: MaxCausalEntIRL | MaxEntIRL, watch: Watch | None) -> Fit | PathFit:
    return irl.fit(course_world(), ONE_WEIGHT_PER_STATE, course_demonstrations(), watch=watch)


def to_moments(irl: MaxCausalEntIRL, watch: Watch | None) -> Fit:
    return irl.fit_moments(course_world(), ONE_WEIGHT_PER_STATE, VISITS, watch=watch)


def to_comparisons(irl: MaxCausalEntIRL, watch: Watch | None) -> Fit:
    shown = course_demonstrations()
    return fit_jointly(irl, course_world(), ONE_WEIGHT_PER_STATE, shown, (shown, shown), watch=watch)


@pytest.mark.filterwarnings("ignore:no policy has these moments")
@pytest.mark.parametrize(
    ("fit_to", "irl"),
    [
        (to_demonstrations, MaxCausalEntIRL(discount=0.9)),
        (to_demonstrations, MaxCausalEntIRL(discount=0.9, solver="lbfgs", tolerance=1e-4)),
        (to_demonstrations, MaxCausalEntIRL(objective="likelihood")),
        (to_demonstrations, MaxCausalEntIRL(horizon=100)),
        (to_moments, MaxCausalEntIRL(discount=0.9, l2=0.1)),
        (to_comparisons, MaxCausalEntIRL()),
        (to_demonstrations, MaxEntIRL()),
        (to_demonstrations, MaxEntIRL(gradient="algorithm1", l2=1e-2)),
    ],
)
def test_a_fit_that_is_watched_is_the_same_and_shows_all_its_history(fit_to: Fitter, irl: MaxCausalEntIRL) -> None:
    seen: list[float] = []
    watched = fit_to(irl, lambda numbers: seen.append(numbers["objective"]))
    alone = fit_to(irl, None)
    assert watched.converged
    assert np.array_equal(watched.weights, alone.weights)
    assert watched.history == alone.history
    values = [value for value, _ in watched.history]
    assert [value for value in seen if value in values][: len(values)] == values, "in order, beside steps tried in vain"


def test_the_gradient_that_is_shown_is_that_of_the_objective() -> None:
    """At θ = 0, where a fit with a discount starts, ∇g = E[φ] - μ: the gap of the policy that chooses at random."""
    irl, seen = MaxCausalEntIRL(discount=0.9, l2=0.5), []
    to_demonstrations(irl, seen.append)
    start = MaxCausalEntIRL(discount=0.9, l2=0.5, max_iterations=0)
    with pytest.warns(ConvergenceWarning):
        random = to_demonstrations(start, None)
    assert seen[0]["largest_gradient"] == pytest.approx(random.gap, rel=1e-12)
    assert seen[0].keys() == {"objective", "largest_gradient"}


@pytest.mark.parametrize("irl", [MaxCausalEntIRL(), MaxEntIRL()])
def test_a_watch_that_raises_ends_the_fit(irl: MaxCausalEntIRL | MaxEntIRL) -> None:
    class EnoughError(Exception):
        pass

    def watch(numbers: object) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        to_demonstrations(irl, watch)


@pytest.mark.parametrize(
    ("fit_to", "irl"),
    [
        (to_demonstrations, MaxCausalEntIRL(max_iterations=1)),
        (to_moments, MaxCausalEntIRL(discount=0.9, max_iterations=1)),
        (to_comparisons, MaxCausalEntIRL(max_iterations=1)),
        (to_demonstrations, MaxEntIRL(max_iterations=1)),
    ],
)
def test_the_warning_names_the_line_that_fits_and_can_be_silenced_alone(fit_to: Fitter, irl: MaxCausalEntIRL) -> None:
    with pytest.warns(ConvergenceWarning) as given:
        fit = fit_to(irl, None)
    assert len(given) == 1
    if fit_to is not to_comparisons:  # its module states shapes: the frame above is that of who checks them here
        assert given[0].filename == __file__
    assert not fit.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit_to(irl, None)


def moments_of(irl: MaxCausalEntIRL, mdp: TabularMDP, reward: LinearReward, weights: np.ndarray):
    """Exact features of the soft-optimal policy of some weights, and that policy."""
    given_setting = irl.setting(reward.bound(mdp), mdp.start)
    plan = given_setting.plan(weights)
    return given_setting.totals(plan, plan.visits(given_setting.sources())), plan.policy


@pytest.mark.parametrize("seed", [2, 3])
def test_lbfgs_matches_exact_moments_of_a_lake_whose_weights_count_unequally(seed) -> None:
    """At discount .99 a state by the way counts a thousand times one beyond the holes."""
    mdp = read_gymnasium(gymnasium.make(newest("FrozenLake"), map_name="8x8"))
    reward, irl = LinearReward(features=np.eye(64)), MaxCausalEntIRL(discount=0.99, l2=0.0, solver="lbfgs")
    moments, _ = moments_of(irl, mdp, reward, np.random.default_rng(seed).normal(size=64))
    fit = irl.fit_moments(mdp, reward, moments)
    assert fit.converged
    assert fit.gap + fit.gap_error <= 1e-7


def test_of_many_weights_a_fit_takes_no_second_derivatives() -> None:
    """Some 600 of them: one Hessian costs what a hundred gradients do."""
    grid = IcyGridWorld(25)
    reward, evaluations = LinearReward(features=np.eye(625)), []
    irl = MaxCausalEntIRL(discount=0.9, l2=1e-2)
    moments, _ = moments_of(irl, grid, reward, np.random.default_rng(0).normal(size=625))
    fit = irl.fit_moments(grid, reward, moments, watch=evaluations.append)
    assert fit.converged
    assert len(evaluations) > 30, "Newton's method takes about ten"


@pytest.mark.parametrize("horizon", [None, 20])
def test_moments_that_no_policy_has_are_told_with_a_penalty_too(horizon) -> None:
    """Episodes of the grid take 4 steps at least, and 250 visits of the start are more than any has by choice."""
    reward, moments = LinearReward(features=np.eye(9)), np.zeros(9)
    moments[8] = 250.0
    irl = MaxCausalEntIRL(discount=0.9, horizon=horizon)
    with warned("no policy has these moments: the gap is 2"):
        irl.fit_moments(GridWorld(3), reward, moments)


@pytest.mark.filterwarnings("error")
def test_a_gap_that_is_the_penaltys_is_no_reason_to_warn() -> None:
    reward, grid = LinearReward(features=np.eye(9)), GridWorld(3)
    moments, _ = moments_of(MaxCausalEntIRL(discount=0.9), grid, reward, 2 * np.random.default_rng(0).normal(size=9))
    fit = MaxCausalEntIRL(discount=0.9, l2=1.0).fit_moments(grid, reward, moments)
    assert fit.gap > 0.01 * np.abs(moments).max()
