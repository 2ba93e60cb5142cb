"""The minimisers on functions whose minima are known: bent, concave in places, and infinite beyond an edge."""

import itertools
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from posttrain.irl.planning import Divergence
from posttrain.irl.solvers import Point, minimise_lbfgs, minimise_newton


@dataclass(frozen=True)
class Known:
    """A function of two weights with its derivatives; `edge` is where the first weight makes it infinite."""

    value: object
    gradient: object
    hessian: object
    edge: float = -np.inf

    def at(self, weights: np.ndarray, guess: None = None) -> Point[None]:
        if weights[0] <= self.edge:
            raise Divergence("beyond the edge")
        x, y = weights
        return Point(
            weights=weights,
            plan=None,
            value=float(self.value(x, y)),
            gradient=np.array(self.gradient(x, y), dtype=float),
            bend=lambda: np.array(self.hessian(x, y), dtype=float),
        )


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


@pytest.mark.parametrize("minimise", [minimise_newton, minimise_lbfgs])
def test_a_slope_without_end_ends_and_claims_nothing(minimise) -> None:
    slope = Known(lambda x, y: -x + y * y, lambda x, y: (-1, 2 * y), lambda x, y: ((0, 0), (0, 2)))
    found = minimise(slope, slope.at(np.array([0.0, 1.0])), tolerance=1e-9, max_iterations=2000)
    assert not found.converged
    assert np.isfinite(found.point.value)


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
