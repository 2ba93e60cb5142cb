"""What a fit shows while it goes on, and how it says that it has not converged."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain import irl
from posttrain.irl.minimisers import Watch
from tests.support import irl_worlds as worlds

Fitting = Callable[[Any, Watch | None], Any]


def to_demonstrations(fitter: Any, watch: Watch | None) -> Any:
    return fitter.fit(worlds.course_world(), worlds.PER_STATE, worlds.course_demonstrations(), watch=watch)


def to_moments(fitter: irl.MaxCausalEntIRL, watch: Watch | None) -> irl.Fit:
    return fitter.fit_moments(worlds.course_world(), worlds.PER_STATE, np.full(25, 2.0), watch=watch)


def to_comparisons(fitter: irl.MaxCausalEntIRL, watch: Watch | None) -> irl.Fit:
    shown = worlds.course_demonstrations()
    return irl.fit_jointly(fitter, worlds.course_world(), worlds.PER_STATE, shown, (shown, shown), watch=watch)


@pytest.mark.filterwarnings("ignore:no policy has these moments")
@pytest.mark.parametrize(
    ("fit_to", "fitter"),
    [
        (to_demonstrations, irl.MaxCausalEntIRL(discount=0.9)),
        (to_demonstrations, irl.MaxCausalEntIRL(discount=0.9, solver="lbfgs", tolerance=1e-4)),
        (to_demonstrations, irl.MaxCausalEntIRL(objective="likelihood")),
        (to_demonstrations, irl.MaxCausalEntIRL(horizon=100)),
        (to_moments, irl.MaxCausalEntIRL(discount=0.9, l2=0.1)),
        (to_comparisons, irl.MaxCausalEntIRL()),
        (to_demonstrations, irl.MaxEntIRL()),
        (to_demonstrations, irl.MaxEntIRL(gradient="algorithm1", l2=1e-2)),
    ],
)
def test_a_fit_that_is_watched_is_the_same_and_shows_all_its_history(fit_to: Fitting, fitter: Any) -> None:
    seen: list[float] = []
    watched = fit_to(fitter, lambda numbers: seen.append(numbers["objective"]))
    alone = fit_to(fitter, None)
    assert watched.converged
    assert np.array_equal(watched.weights, alone.weights)
    assert watched.history == alone.history
    values = [value for value, _ in watched.history]
    assert [value for value in seen if value in values][: len(values)] == values, "in order, beside steps tried in vain"


def test_the_gradient_that_is_shown_is_that_of_the_objective() -> None:
    """At θ = 0, where a fit with a discount starts, ∇g = E[φ] - μ: the gap of the policy that chooses at random."""
    fitter, seen = irl.MaxCausalEntIRL(discount=0.9, l2=0.5), []
    to_demonstrations(fitter, seen.append)
    start = irl.MaxCausalEntIRL(discount=0.9, l2=0.5, max_iterations=0)
    with pytest.warns(irl.ConvergenceWarning):
        random = to_demonstrations(start, None)
    assert seen[0]["largest_gradient"] == pytest.approx(random.gap, rel=1e-12)
    assert seen[0].keys() == {"objective", "largest_gradient"}


@pytest.mark.parametrize("fitter", [irl.MaxCausalEntIRL(), irl.MaxEntIRL()])
def test_a_watch_that_raises_ends_the_fit(fitter: Any) -> None:
    class EnoughError(Exception):
        pass

    def watch(numbers: object) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        to_demonstrations(fitter, watch)


@pytest.mark.parametrize(
    ("fit_to", "fitter"),
    [
        (to_demonstrations, irl.MaxCausalEntIRL(max_iterations=1)),
        (to_moments, irl.MaxCausalEntIRL(discount=0.9, max_iterations=1)),
        (to_comparisons, irl.MaxCausalEntIRL(max_iterations=1)),
        (to_demonstrations, irl.MaxEntIRL(max_iterations=1)),
    ],
)
def test_the_warning_names_the_line_that_fits_and_can_be_silenced_alone(fit_to: Fitting, fitter: Any) -> None:
    with pytest.warns(irl.ConvergenceWarning) as given:
        fit = fit_to(fitter, None)
    assert len(given) == 1
    if fit_to is not to_comparisons:  # its module states shapes: the frame above is that of who checks them here
        assert given[0].filename == __file__
    assert not fit.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", irl.ConvergenceWarning)
        fit_to(fitter, None)
