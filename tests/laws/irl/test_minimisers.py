"""Minimisers on functions whose minima are known; and what a fit shows while it goes on or has not converged."""

import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from posttrain import irl
from posttrain.irl import minimisers
from posttrain.irl.minimisers import Point, Watch, by_newton, lbfgs_step, minimise_lbfgs, minimise_newton
from tests.support import irl_worlds as worlds

SEEDS = st.integers(0, 10_000)


def point(weights: Any, value: float, gradient: Any, hessian: Any = ((1.0,),)) -> Point[None]:
    here, slope, bend = (np.asarray(each, dtype=float) for each in (weights, gradient, hessian))
    here, slope = np.atleast_1d(here, slope)
    return Point(weights=here, plan=None, value=float(value), gradient=slope, bend=lambda: bend)


@dataclass(frozen=True)
class Known:
    """A function of two weights with its derivatives; `edge` is where the first weight makes it infinite."""

    value: Callable[[float, float], float]
    gradient: Callable[[float, float], object]
    hessian: Callable[[float, float], object]
    edge: float = -np.inf

    def at(self, weights: np.ndarray, guess: None = None) -> Point[None]:
        if weights[0] <= self.edge:
            raise irl.Divergence("beyond the edge")
        return point(weights, self.value(*weights), self.gradient(*weights), self.hessian(*weights))


VALLEY = Known(  # Rosenbrock's, minimum at (1, 1)
    lambda x, y: (1 - x) ** 2 + 100 * (y - x * x) ** 2,
    lambda x, y: (-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)),
    lambda x, y: ((2 - 400 * (y - 3 * x * x), -400 * x), (-400 * x, 200)),
)
TWO_WELLS = Known(  # minima at (±1, 0), a saddle between them
    lambda x, y: (x * x - 1) ** 2 + y * y,
    lambda x, y: (4 * x * (x * x - 1), 2 * y),
    lambda x, y: ((12 * x * x - 4, 0), (0, 2)),
)
EDGE = Known(  # minimum at (1, 3); the first step of Newton's method from 3 would leave its domain
    lambda x, y: x - np.log(x) + (y - 3) ** 2,
    lambda x, y: (1 - 1 / x, 2 * (y - 3)),
    lambda x, y: ((1 / x**2, 0), (0, 2)),
    edge=0.0,
)


@pytest.mark.parametrize("minimise", [minimise_newton, minimise_lbfgs])
@pytest.mark.parametrize(
    ("function", "start", "minimum"),
    [(VALLEY, (-1.2, 1.0), (1, 1)), (TWO_WELLS, (0.1, 1.0), (1, 0)), (EDGE, (3.0, -20.0), (1, 3))],
)
def test_the_minimum_is_found_from_afar(minimise, function, start, minimum) -> None:
    found = minimise(function, function.at(np.array(start)), tolerance=1e-9, max_iterations=300)
    assert found.converged
    np.testing.assert_allclose(found.point.weights, minimum, rtol=0, atol=1e-8)
    values = [value for value, _ in found.history]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(values))


def test_newton_is_quadratic_near_the_minimum_and_stops_where_it_is_told_to() -> None:
    start = VALLEY.at(np.array([-1.2, 1.0]))
    assert len(minimise_newton(VALLEY, start, tolerance=1e-9, max_iterations=300).history) < 40
    early = minimise_newton(VALLEY, start, tolerance=1e-9, max_iterations=3)
    assert not early.converged
    assert len(early.history) == 4


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("minimise", [minimise_newton, minimise_lbfgs])
def test_a_slope_without_end_ends_and_claims_nothing(minimise, sign) -> None:
    slope = Known(lambda x, y: sign * x + y * y, lambda x, y: (sign, 2 * y), lambda x, y: ((0, 0), (0, 2)))
    found = minimise(slope, slope.at(np.array([0.0, 1.0])), tolerance=1e-9, max_iterations=2000)
    assert not found.converged
    assert np.isfinite(found.point.value)
    assert np.abs(found.point.weights).max() < 1e9, "soon after weights are beyond 10⁸"


@pytest.mark.parametrize(
    ("bend", "kept", "lengths"),
    [
        (1e-6, 0.9, [10, 40, 160]),
        (1e-6, 0.7, [10, 10, 10]),
        (1e-6, 0.22, [10, 10 / 4, 10 / 16]),
        (0.5, 0.3, [2, 2, 2]),
        (0.5, 0.22, [2, 2 / 4, 2 / 16]),
    ],
)
def test_the_radius_follows_what_of_its_promise_a_step_keeps(bend, kept, lengths) -> None:
    """Gradient -1 and curvature h everywhere promise s - h s²/2 of a step s, at most 10 at first, or 1/h; a value that
    falls by a share of that per step.  Below a quarter the radius is a quarter of the step, above three quarters of a
    step to the edge it is four times as long (Nocedal & Wright 2006, algorithm 4.1, has twice)."""
    whole = min(10, 1 / bend)
    per_length = kept * (whole - bend * whole**2 / 2) / whole
    slope = Known(lambda x, y: -per_length * x, lambda x, y: (-1, 0), lambda x, y: ((bend, 0), (0, bend)))
    found = minimise_newton(slope, slope.at(np.zeros(2)), tolerance=1e-9, max_iterations=3)
    steps = -np.diff([value for value, _ in found.history]) / per_length
    assert steps == pytest.approx(lengths, rel=0.15)  # λ is found to a twentieth


def test_a_direction_in_which_nothing_changes_is_left_alone() -> None:
    flat = Known(lambda x, y: (x - 2) ** 2, lambda x, y: (2 * (x - 2), 0), lambda x, y: ((2, 0), (0, 0)))
    found = minimise_newton(flat, flat.at(np.array([-5.0, 7.0])), tolerance=1e-9, max_iterations=50)
    assert found.converged
    np.testing.assert_allclose(found.point.weights, (2, 7), rtol=0, atol=1e-9)


@pytest.mark.parametrize("minimise", [minimise_newton, minimise_lbfgs])
def test_of_the_points_on_the_way_only_the_last_is_kept(minimise) -> None:
    """Each holds the factors of a world: hundreds of them would fill the memory of a machine."""
    seen: list[weakref.ref[Point[None]]] = []
    most = 0

    class Watched:
        def at(self, weights: np.ndarray, guess: None = None) -> Point[None]:
            nonlocal most
            point = VALLEY.at(weights)
            seen.append(weakref.ref(point))
            most = max(most, sum(ref() is not None for ref in seen))
            return point

    objective = Watched()
    found = minimise(objective, objective.at(np.array([-1.2, 1.0])), tolerance=1e-9, max_iterations=300)
    assert len(found.history) > 10
    assert most <= 4  # the start, which the caller holds, the point, a candidate that failed and the next


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_in_any_unit_what_rounding_leaves_of_a_flat_direction_is_no_curvature(unit) -> None:
    """Along x - y nothing changes, but the eigenvalues there come out as 10⁻¹⁶ of the others."""
    valley = Known(
        lambda x, y: unit * (x + y - 2) ** 2 + 1,
        lambda x, y: (2 * unit * (x + y - 2),) * 2,
        lambda x, y: ((2 * unit, 2 * unit),) * 2,
    )
    found = minimise_newton(valley, valley.at(np.array([-5.0, 4.0])), tolerance=1e-9 * unit, max_iterations=20)
    assert found.converged
    np.testing.assert_allclose(found.point.weights, (-3.5, 5.5), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("change_of_value", "slope_after", "accepted"),
    [
        (-2e-4, 5.0, True),  # more than 10⁻⁴ of the 1 that was promised
        (-0.5e-4, 5.0, False),
        (0.0, 0.9, True),  # where values no longer tell, a slope that has not turned round altogether
        (0.0, 1.5, False),
        (0.5e-13, 0.9, True),
        (1e-12, 0.9, False),
    ],
)
def test_a_step_is_acceptable_by_its_value_or_else_by_its_slope(change_of_value, slope_after, accepted) -> None:
    before, after = point(0.0, 1.0, -1.0), point(1.0, 1.0 + change_of_value, slope_after)
    assert minimisers.sufficient_decrease(before, after, np.ones(1), -1.0) is accepted
    uphill, same = point(0.0, 1.0, 1.0), point(1.0, 1.0, -0.9)
    assert not minimisers.sufficient_decrease(uphill, same, np.ones(1), -1.0)


@given(seed=SEEDS, radius=st.sampled_from([1e-3, 1.0, 1e3]), lowest=st.sampled_from([-2.0, 0.1]))
def test_a_trusted_step_is_the_lowest_point_of_the_model_within_the_radius(seed, radius, lowest) -> None:
    """Nocedal & Wright 2006, theorem 4.1: (H + λ) s = -∇ for a λ ≥ 0 that leaves no curvature negative, and λ > 0 only
    where s would be too long without; λ is found to a twentieth."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    curvatures = np.append(lowest, lowest + rng.exponential(size=3))
    hessian, gradient = axes * curvatures @ axes.T, rng.normal(size=4)
    step = minimisers.trusted_step(point(np.zeros(4), 0.0, gradient, hessian), radius, 1e-9)
    pull = -(hessian @ step + gradient)
    shift = pull @ step / (step @ step)
    np.testing.assert_allclose(pull, shift * step, rtol=0, atol=1e-7 * np.abs(pull).max() + 1e-9)
    assert np.linalg.norm(step) <= radius * (1 + 1e-9)
    assert shift >= max(0.0, -lowest) - 1e-7
    less = 0.94 * shift
    if shift > 1e-7 and less > -lowest:
        assert np.linalg.norm(np.linalg.solve(hessian + less * np.eye(4), gradient)) > radius


@given(seed=SEEDS, num_pairs=st.integers(1, 5))
def test_an_lbfgs_step_is_that_of_the_dense_update(seed, num_pairs) -> None:
    """Nocedal & Wright 2006, eqs. 6.17 and 7.20: H ← (I - ρ s yᵀ) H (I - ρ y sᵀ) + ρ s sᵀ, from H = (s·y / y·y) I."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(4, 4))
    moves = rng.normal(size=(num_pairs, 4))
    bends = moves @ (root @ root.T + np.eye(4))
    inverse = np.eye(4) * (moves[-1] @ bends[-1]) / (bends[-1] @ bends[-1])
    for moved, bent in zip(moves, bends, strict=True):
        without = np.eye(4) - np.outer(moved, bent) / (moved @ bent)
        inverse = without @ inverse @ without.T + np.outer(moved, moved) / (moved @ bent)
    gradient = rng.normal(size=4)
    step = lbfgs_step(gradient, deque(zip(moves, bends, strict=True)))
    np.testing.assert_allclose(step, -inverse @ gradient, rtol=1e-9, atol=1e-9)


def test_the_first_step_of_lbfgs_is_downhill_and_no_longer_than_one() -> None:
    none = deque()
    assert lbfgs_step(np.array([3.0, -4.0]), none).tolist() == [-0.75, 1.0]
    assert lbfgs_step(np.array([0.5, -0.25]), none).tolist() == [-0.5, 0.25]


def test_without_a_name_the_method_is_the_quicker_one_for_so_many_weights() -> None:
    chosen = [
        by_newton("auto", num_weights)
        for num_weights in (1, minimisers.NEWTON_WEIGHTS, minimisers.NEWTON_WEIGHTS + 1, 10**5)
    ]
    assert chosen == [True, True, False, False]
    assert by_newton("newton", 10**5)
    assert not by_newton("lbfgs", 1)


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
    def watch(numbers: object) -> None:
        raise EOFError

    with pytest.raises(EOFError):
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
