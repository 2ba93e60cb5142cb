"""Minimising an objective over weights: Newton in a trust region with the exact Hessian, or L-BFGS.

Where the weights make no finite values the objective counts as +∞, and the step is tried again shorter.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np

from posttrain.irl.curvature import Matrix
from posttrain.irl.features import Weights
from posttrain.irl.linear_solvers import Divergence

PlanT = TypeVar("PlanT")
"""What an objective plans at some weights; planning at weights near by starts from it."""

Watch = Callable[[Mapping[str, float]], None]
"""Called with the numbers of each evaluation, also of steps that are rejected.  What it raises ends the fit."""

ARMIJO = 1e-4
"""The share of the promised decrease that a step must bring."""
SMALLEST_STEP = 1e-10
LARGEST_WEIGHTS = 1e8
"""Larger weights are diverging: no finite weights match the moments."""
FLAT = 1e-12
"""Curvature below this share of the largest counts as 0: the data says nothing in that direction."""
SLACK = 1e-13
"""Relative change of a value that rounding may cause."""
PATIENCE = 100
"""Newton's method stops after this many steps without a smaller gradient."""
MEMORY = 100
"""Steps that L-BFGS remembers: cheap compared with planning, and enough for all curvature of that many weights.

With 20, a frozen lake of 64 exact moments at discount .99 did not converge in 5,000 steps; with 100 it takes some 500.
"""
NEWTON_WEIGHTS = 500
"""Most weights for which Newton's method is faster than L-BFGS: `benchmarks/irl.py --only solvers` measures both."""

SolverName = Literal["auto", "newton", "lbfgs"]
SOLVERS: tuple[SolverName, ...] = get_args(SolverName)


@dataclass(frozen=True, kw_only=True, eq=False)
class Point(Generic[PlanT]):
    """An objective at some weights."""

    weights: Weights
    plan: PlanT
    value: float
    gradient: Weights
    bend: Callable[[], Matrix]
    """Computes the Hessian, which costs as much as everything else combined."""

    @cached_property
    def hessian(self) -> Matrix:
        return self.bend()

    @property
    def gradient_norm(self) -> float:
        return float(np.abs(self.gradient).max())

    @property
    def measure(self) -> tuple[float, float]:
        """The part of a point that a history keeps; its factors may take a gigabyte."""
        return self.value, self.gradient_norm

    @property
    def numbers(self) -> Mapping[str, float]:
        return {"objective": self.value, "largest_gradient": self.gradient_norm}


@runtime_checkable
class DifferentiableObjective(Protocol[PlanT]):
    """What is minimised."""

    def at(self, weights: Weights, guess: PlanT | None = None) -> Point[PlanT]:
        """Raises `Divergence` where the weights make no finite values."""


@dataclass(frozen=True, eq=False)
class Descent(Generic[PlanT]):
    """How a minimisation went."""

    point: Point[PlanT]
    converged: bool
    history: tuple[tuple[float, float], ...]
    """Value and largest gradient entry, at the start and after each step."""


@dataclass(frozen=True, eq=False)
class RescaledObjective(Generic[PlanT]):
    """An objective of weights times `units`: with features in units of their size no direction is flat for its unit."""

    objective: DifferentiableObjective[PlanT]
    units: Weights

    def at(self, weights: Weights, guess: PlanT | None = None) -> Point[PlanT]:
        return rescaled_point(self.objective.at(weights / self.units, guess), self.units)


def rescaled_point(point: Point[PlanT], units: Weights) -> Point[PlanT]:
    return Point(
        weights=point.weights * units,
        plan=point.plan,
        value=point.value,
        gradient=point.gradient / units,
        bend=lambda: point.hessian / np.outer(units, units),
    )


def by_newton(solver: SolverName, num_weights: int) -> bool:
    return solver == "newton" or (solver == "auto" and num_weights <= NEWTON_WEIGHTS)


def descend(
    objective: DifferentiableObjective[PlanT],
    start: Point[PlanT],
    units: Weights,
    solver: SolverName = "auto",
    *,
    tolerance: float,
    most: int,
) -> Descent[PlanT]:
    """Minimise by the solver of that name in at most `most` iterations, with features in units of their size."""
    minimise = minimise_newton if by_newton(solver, len(units)) else minimise_lbfgs
    scaled = RescaledObjective(objective, units)
    found = minimise(scaled, rescaled_point(start, units), tolerance=tolerance, max_iterations=most)
    return replace(found, point=rescaled_point(found.point, 1 / units))


def minimise_newton(
    objective: DifferentiableObjective[PlanT], start: Point[PlanT], *, tolerance: float, max_iterations: int
) -> Descent[PlanT]:
    """Newton's method in a trust region (Nocedal & Wright 2006, ch. 4).

    The radius limits steps from a flat start.  Where the objective is concave, which the likelihood can be, the step
    still goes downhill.
    """
    point, history, radius = start, [start.measure], max(10.0, float(np.linalg.norm(start.weights)))
    least, waited = np.inf, 0
    for _ in range(max_iterations):
        if point.gradient_norm <= tolerance or np.abs(point.weights).max() > LARGEST_WEIGHTS:
            break
        least, waited = min(least, point.gradient_norm), 0 if point.gradient_norm < least else waited + 1
        if waited >= PATIENCE:
            break
        while radius > SMALLEST_STEP:
            step = trusted_step(point, radius, tolerance)
            candidate, size = evaluate_step(objective, point, step), float(np.linalg.norm(step))
            promised = -float(point.gradient @ step + step @ point.hessian @ step / 2)
            gained = -np.inf if candidate is None else (point.value - candidate.value) / max(promised, 1e-300)
            if gained < 1 / 4:
                radius = size / 4
            elif gained > 3 / 4 and size > 0.9 * radius:
                radius *= 4
            if candidate is not None and sufficient_decrease(point, candidate, step, -promised):
                point = candidate
                history.append(point.measure)
                break
        else:
            break
    return Descent(point=point, converged=point.gradient_norm <= tolerance, history=tuple(history))


def trusted_step(point: Point[PlanT], radius: float, tolerance: float) -> Weights:
    """Where the quadratic model is lowest within the radius: -(H + λ)⁻¹ ∇ with the smallest λ that keeps it there.

    Weights stay along directions without curvature and with a gradient within the tolerance.
    """
    curvatures, axes = np.linalg.eigh(point.hessian)
    along = axes.T @ point.gradient
    floor = FLAT * max(float(np.abs(curvatures).max()), 1e-300)
    along[(np.abs(curvatures) <= floor) & (np.abs(along) <= tolerance)] = 0
    low = max(0.0, floor - float(curvatures.min()))

    def steps(shift: float) -> Weights:
        shifted: Weights = -along / (curvatures + shift)
        return shifted

    high = low
    while np.linalg.norm(steps(high)) > radius:
        high = max(2 * high, floor)
    for _ in range(60):
        if np.linalg.norm(steps(low)) <= radius:
            high = low
            break
        middle = (low * high) ** 0.5 if low > 0 else high / 4
        low, high = (middle, high) if np.linalg.norm(steps(middle)) > radius else (low, middle)
        if high - low <= 0.05 * high:
            break
    step: Weights = axes @ steps(high)
    return step


def minimise_lbfgs(
    objective: DifferentiableObjective[PlanT], start: Point[PlanT], *, tolerance: float, max_iterations: int
) -> Descent[PlanT]:
    """Limited-memory BFGS (Nocedal & Wright 2006, ch. 7): needs gradients only, so thousands of weights."""
    point, history, pairs = start, [start.measure], deque[tuple[Weights, Weights]](maxlen=MEMORY)
    for _ in range(max_iterations):
        if point.gradient_norm <= tolerance or np.abs(point.weights).max() > LARGEST_WEIGHTS:
            break
        following = line_search(objective, point, lbfgs_step(point.gradient, pairs))
        if following is None and not pairs:
            break
        if following is None:
            pairs.clear()  # the memory misleads: start again downhill
            continue
        moved, bent = following.weights - point.weights, following.gradient - point.gradient
        if moved @ bent > FLAT * (bent @ bent):
            pairs.append((moved, bent))
        point = following
        history.append(point.measure)
    return Descent(point=point, converged=point.gradient_norm <= tolerance, history=tuple(history))


def lbfgs_step(gradient: Weights, pairs: deque[tuple[Weights, Weights]]) -> Weights:
    """-H⁻¹ ∇ with the curvature that the remembered steps have seen."""
    if not pairs:
        return -gradient / max(1.0, float(np.abs(gradient).max()))
    direction, shares = -gradient, []
    for moved, bent in reversed(pairs):
        share = (moved @ direction) / (moved @ bent)
        shares.append(share)
        direction = direction - share * bent
    moved, bent = pairs[-1]
    direction = direction * ((moved @ bent) / (bent @ bent))
    for (moved, bent), share in zip(pairs, reversed(shares), strict=True):
        direction = direction + (share - (bent @ direction) / (moved @ bent)) * moved
    full: Weights = direction
    return full


def line_search(objective: DifferentiableObjective[PlanT], point: Point[PlanT], step: Weights) -> Point[PlanT] | None:
    """The first point on the way back from a full step that lowers the objective enough."""
    slope = float(point.gradient @ step)
    length = 1.0
    while slope < 0 and length >= SMALLEST_STEP:
        candidate = evaluate_step(objective, point, length * step)
        if candidate is not None and sufficient_decrease(point, candidate, step, length * slope):
            return candidate
        length /= 2
    return None


def evaluate_step(objective: DifferentiableObjective[PlanT], point: Point[PlanT], step: Weights) -> Point[PlanT] | None:
    try:
        return objective.at(point.weights + step, point.plan)
    except Divergence:
        return None


def sufficient_decrease(point: Point[PlanT], candidate: Point[PlanT], step: Weights, change: float) -> bool:
    """Whether a step lowers the objective by enough of the promised `change`.

    Near the minimum rounding hides the change of value.  There the slope along the step decides, as in the approximate
    Wolfe conditions of Hager & Zhang 2005.
    """
    if candidate.value <= point.value + ARMIJO * change and candidate.value < point.value:
        return True
    same = candidate.value <= point.value + SLACK * max(1.0, abs(point.value))
    before, after = float(point.gradient @ step), float(candidate.gradient @ step)
    return same and before < 0 and after <= (2 * ARMIJO - 1) * before
