"""Maximum entropy inverse RL of 2008, done exactly: Ziebart, Maas, Bagnell & Dey, AAAI 2008.

Fits the distribution over paths whose features match the demonstrations.  As a model of behaviour it is only right for
deterministic dynamics.  Otherwise it chooses its slips, and its policy, when executed, visits other states than the
model predicts.  `executed_gap` in the result says how far off; use `MaxCausalEntIRL` there.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from posttrain.errors import UserError
from posttrain.irl import arguments, causal, comparison, counting, curvature, feasibility, linear_solvers, planning
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import Features, LinearReward, Weights, dense
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import ARMIJO, SMALLEST_STEP, Descent, Point, Watch, descend
from posttrain.irl.paths import PathPlan, PerState, executed_slopes, path_curvature, path_partition

PATIENCE = 15
"""Steps in which the distance to algorithm 1's zero must shrink by half."""
STRONG = 0.1
"""A penalty with which the zero is near."""


@dataclass(frozen=True, eq=False)
class PathDual:
    """g(θ) = Σ_s start(s) log Z_θ(s) - θ·μ + (l2/2)‖θ‖²: convex, its gradient the visits under tilted dynamics."""

    features: Features
    start: PerState
    moments: Weights
    l2: float
    watch: Watch | None = None

    def at(self, weights: Weights, guess: PathPlan | None = None) -> Point[PathPlan]:
        """g, ∇g = E_q[φ] - μ + l2 θ, and ∇²g."""
        plan = path_partition(
            self.features.mdp, self.features.rewards(weights), guess=None if guess is None else guess.values
        )
        visits = plan.visits(self.start)

        def bend() -> curvature.Matrix:
            return path_curvature(plan, dense(self.features.table), visits) + self.l2 * np.eye(len(weights))

        point = Point(
            weights=weights,
            plan=plan,
            value=float(self.start @ plan.values - weights @ self.moments + self.l2 / 2 * weights @ weights),
            gradient=np.asarray(self.features.table.T @ visits) - self.moments + self.l2 * weights,
            bend=bend,
        )
        if self.watch is not None:
            self.watch(point.numbers)
        return point

    def algorithm1(self, point: Point[PathPlan]) -> Weights:
        """What algorithm 1 of the paper calls the gradient: visits of the policy under the true dynamics."""
        visits = comparison.occupancy_from(self.features.mdp, point.plan.policy(), self.start, discount=1.0)
        direction: Weights = self.features.table.T @ visits - self.moments + self.l2 * point.weights
        return direction

    def algorithm1_slopes(self, point: Point[PathPlan]) -> curvature.Matrix:
        """The derivative of algorithm 1's direction: not a Hessian, as it is not symmetric."""
        moving = executed_slopes(point.plan, dense(self.features.table), self.start)
        return moving + self.l2 * np.eye(len(point.weights))


@dataclass(frozen=True, kw_only=True, eq=False)
class PathFit:
    """The result of a fit of the path model."""

    weights: Weights
    reward: PerState
    log_partition: PerState
    policy: planning.Policy
    """P(a|s) of the model."""
    expected: Weights
    """Features of the model's own paths, under tilted dynamics."""
    executed: Weights
    """Features of an episode of the policy under the true dynamics."""
    moments: Weights
    converged: bool
    """Whether the gradient that is followed fell to the tolerance."""
    history: tuple[tuple[float, float], ...]
    """Objective and largest entry of the gradient that is followed, at the start and after each
    iteration."""

    @property
    def num_iterations(self) -> int:
        return len(self.history) - 1

    @property
    def gap(self) -> float:
        """The largest difference between the demonstrations' features and the model's own."""
        return float(np.abs(self.expected - self.moments).max())

    @property
    def executed_gap(self) -> float:
        """The largest difference between the demonstrations' features and those of the executed policy."""
        return float(np.abs(self.executed - self.moments).max())


@dataclass(frozen=True, kw_only=True)
class MaxEntIRL:
    """Settings of a fit of the path model, at discount 1, with features of states."""

    gradient: Literal["tilted", "algorithm1"] = "tilted"
    """"tilted" is the gradient of the likelihood.  "algorithm1" is not a gradient under random dynamics: its zero is
    sought.

    It had a zero for every l2 > 0 that was tried.  Without a zero, as with l2 = 0 and visits that no such policy has,
    the fit stops early and reports that it has not converged.
    """
    l2: float = 1e-3
    tolerance: float = 1e-8
    """Largest entry of the gradient at which the fit is done, with features in units of their size."""
    max_iterations: int = 1000

    def __post_init__(self) -> None:
        arguments.require_word(self.gradient, "gradient", ("tilted", "algorithm1"))
        arguments.check_numbers(self, l2=arguments.NON_NEGATIVE, tolerance=arguments.POSITIVE)
        arguments.checked_integer(self.max_iterations, "max_iterations", least=0)

    def fit(
        self, mdp: TabularMDP, reward: LinearReward, demonstrations: Demonstrations, *, watch: Watch | None = None
    ) -> PathFit:
        """The weights of the path distribution that matches the demonstrations, given where each starts."""
        arguments.require_kind(reward, LinearReward, "reward")
        arguments.check_watch(watch)
        known = counting.in_world(demonstrations, mdp)
        counting.check_whole(known, mdp, discount=1.0, horizon=None)
        features = reward.bound(mdp)
        if not features.per_state:
            raise UserError(f"on = {reward.on!r}: the path model has features of states; use on='state'")
        starts = counting.start_shares(known, mdp.num_states)
        observed = features.observed(counting.discounted_counts(known, mdp, discount=1.0))
        dual = PathDual(features, starts, observed, self.l2, watch)
        # Weights under which every step costs more than the log of its ways, if the features can say so; else 0.
        cost = feasibility.constant_cost(causal.MaxCausalEntIRL(l2=self.l2).setting(features, starts))
        first = dual.at(np.zeros(features.num_features) if cost is None else cost)
        if self.gradient == "tilted":
            found = descend(dual, first, features.units, tolerance=self.tolerance, most=self.max_iterations)
        else:
            found = self.find_zero(dual, first)
        fit = path_fit_of_descent(dual, found)
        if not fit.converged:
            warnings.warn(
                f"the fit has not converged: its largest gradient is {fit.history[-1][1]:.3g} after "
                f"{fit.num_iterations} iterations; use a larger l2, or raise max_iterations or tolerance",
                linear_solvers.ConvergenceWarning,
                stacklevel=2,
            )
        return fit

    def find_zero(self, dual: PathDual, first: Point[PathPlan]) -> Descent[PathPlan]:
        """Newton's method on algorithm 1's direction; where that fails, from the zero of a stronger penalty."""
        found = self.newton_zero(dual, first)
        if found.converged or not 0 < dual.l2 < STRONG:
            return found
        stronger = replace(dual, l2=4 * dual.l2)
        on_the_way = self.find_zero(stronger, stronger.at(first.weights))
        return self.newton_zero(dual, dual.at(on_the_way.point.weights)) if on_the_way.converged else found

    def newton_zero(self, dual: PathDual, first: Point[PathPlan]) -> Descent[PathPlan]:
        """Newton's method while its steps shorten the direction, by half in every `PATIENCE` of them."""
        point, direction, units = first, dual.algorithm1(first), dual.features.units
        history = [(first.value, float(np.abs(direction / units).max()))]
        while history[-1][1] > self.tolerance and len(history) <= self.max_iterations:
            found = backtracking_step(dual, point, direction)
            stalled = len(history) > PATIENCE and history[-1][1] > history[-1 - PATIENCE][1] / 2
            if found is None or stalled:
                break
            point, direction = found
            history.append((point.value, float(np.abs(direction / units).max())))
        return Descent(point=point, converged=history[-1][1] <= self.tolerance, history=tuple(history))


def backtracking_step(
    dual: PathDual, point: Point[PathPlan], direction: Weights
) -> tuple[Point[PathPlan], Weights] | None:
    """The first point on the way back from a Newton step at which algorithm 1's direction is shorter, or None."""
    units = dual.features.units  # in which nothing is flat for its unit
    step = np.linalg.lstsq(dual.algorithm1_slopes(point) / np.outer(units, units), -direction / units, rcond=None)[0]
    reach = max(10.0, float(np.linalg.norm(point.weights * units)))
    length = min(1.0, reach / float(np.linalg.norm(step)))
    while length > SMALLEST_STEP:
        try:
            candidate = dual.at(point.weights + length * step / units, point.plan)
            changed = dual.algorithm1(candidate)
        except linear_solvers.Divergence:
            pass  # there the partition is infinite: a shorter step
        else:
            if np.linalg.norm(changed / units) < (1 - ARMIJO * length) * np.linalg.norm(direction / units):
                return candidate, changed
        length /= 2
    return None


def path_fit_of_descent(dual: PathDual, found: Descent[PathPlan]) -> PathFit:
    """The fit at the last point of a minimisation."""
    point = found.point
    features, policy = dual.features, point.plan.policy()
    visits = comparison.occupancy_from(features.mdp, policy, dual.start, discount=1.0)
    return PathFit(
        weights=point.weights,
        reward=features.rewards(point.weights),
        log_partition=point.plan.values,
        policy=policy,
        expected=np.asarray(features.table.T @ point.plan.visits(dual.start)),
        executed=np.asarray(features.table.T @ visits),
        moments=dual.moments,
        converged=found.converged,
        history=found.history,
    )
