"""Maximum causal entropy inverse RL: the reward under which soft planning behaves as the demonstrations do."""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.errors import UserError
from posttrain.irl import arguments
from posttrain.irl.counting import action_counts, check_horizon, check_whole, discounted_counts, in_world, start_shares
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.feasibility import feasible_start, smallest_gap
from posttrain.irl.features import Features, LinearReward, Weights, moments_array
from posttrain.irl.fitting import Fit, fit_of_descent
from posttrain.irl.linear_solvers import ConvergenceWarning, Divergence
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import SOLVERS, Descent, SolverName, Watch, descend
from posttrain.irl.objectives import Dual, Likelihood, Plan, PlannedObjective, Setting, WatchedObjective

QUICK_PAIRS = 5_000
"""Pairs of state and action up to which a warning waits for the least gap of any policy."""
UNMATCHED = 0.01
"""Share of the largest moment by which moments may miss those of any policy without a warning."""


@dataclass(frozen=True, kw_only=True)
class MaxCausalEntIRL:
    """Settings of a fit; `fit` takes demonstrations, `fit_moments` the features that a policy should have."""

    objective: Literal["dual", "likelihood"] = "dual"
    """"dual": convex, matches features.  "likelihood": makes the demonstrated actions likely; not convex in general."""
    discount: float = 1.0
    """At 1 every episode must be able to end."""
    temperature: float = 1.0
    """How much entropy is worth, in units of reward; a lower value fits a greedier policy."""
    horizon: int | None = None
    """Most actions in an episode; None means no limit."""
    l2: float = 1e-3
    """Penalty (l2/2)‖θ‖².  With 0, features that no policy can match have no finite weights."""
    solver: SolverName = "auto"
    """"newton" takes about ten steps, "lbfgs" hundreds that are cheap.  "auto": Newton up to 500 weights."""
    tolerance: float = 1e-8
    """Largest entry of the gradient at which the fit is done, with features in units of their size."""
    max_iterations: int = 5000

    def __post_init__(self) -> None:
        arguments.require_word(self.objective, "objective", ("dual", "likelihood"))
        arguments.require_word(self.solver, "solver", SOLVERS)
        arguments.check_numbers(
            self,
            discount=arguments.SHARE,
            temperature=arguments.POSITIVE,
            l2=arguments.NON_NEGATIVE,
            tolerance=arguments.POSITIVE,
        )
        arguments.checked_integer(self.max_iterations, "max_iterations", least=0)
        if self.horizon is not None:
            arguments.checked_integer(self.horizon, "horizon", least=1)

    def fit(
        self, mdp: TabularMDP, reward: LinearReward, demonstrations: Demonstrations, *, watch: Watch | None = None
    ) -> Fit:
        """The weights under which soft planning behaves as demonstrated, starting where the demonstrations start.

        The likelihood starts from the same weights as the dual, not from the dual's minimum: with a small penalty the
        weights there are huge, and nothing has a slope.
        """
        features = arguments.require_kind(reward, LinearReward, "reward").bound(mdp)
        known = in_world(demonstrations, mdp)
        setting = self.setting(features, start_shares(known, mdp.num_states))
        if self.objective == "dual":
            check_whole(known, mdp, discount=self.discount, horizon=self.horizon)
        moments = features.observed(discounted_counts(known, mdp, discount=self.discount))
        actions = self.action_counts(known, mdp)
        objective = Dual(setting, moments) if self.objective == "dual" else Likelihood(setting, actions)
        fit = fit_of_descent(self.minimise(objective, watch), objective, moments, actions, len(known))
        warn_unless_converged(fit)
        return fit

    def fit_moments(
        self, mdp: TabularMDP, reward: LinearReward, moments: arguments.Numbers, *, watch: Watch | None = None
    ) -> Fit:
        """Fit exact features of a policy, per episode from the world's start: the dual only."""
        if self.objective != "dual":
            raise UserError("objective = 'likelihood' needs demonstrations, not moments; use objective='dual'")
        features = arguments.require_kind(reward, LinearReward, "reward").bound(mdp)
        wanted = moments_array(features, moments)
        dual = Dual(self.setting(features, mdp.start), wanted)
        fit = fit_of_descent(self.minimise(dual, watch), dual, wanted, None, 0)
        warn_unless_converged(fit)
        warn_unless_possible(fit)
        return fit

    def setting(self, features: Features, start: Weights) -> Setting:
        shared = {name: getattr(self, name) for name in ("discount", "temperature", "horizon", "l2")}
        return Setting(features=features, start=start, **shared)

    def action_counts(self, known: Demonstrations, mdp: TabularMDP) -> np.ndarray:
        """Undiscounted: every decision counts equally."""
        if self.horizon is None:
            return discounted_counts(known, mdp, discount=1.0).acting
        check_horizon(known, self.horizon)
        return action_counts(known, mdp, horizon=self.horizon)

    def minimise(self, objective: PlannedObjective, watch: Watch | None) -> Descent[Plan]:
        arguments.check_watch(watch)
        watched = objective if watch is None else WatchedObjective(objective, watch)
        units = objective.setting.features.units
        return descend(
            watched, feasible_start(watched), units, self.solver, tolerance=self.tolerance, most=self.max_iterations
        )


def warn_unless_converged(fit: Fit) -> None:
    """Warn the caller of the fit; without a penalty the warning says what gap is possible."""
    if not fit.converged:
        largest = f"its largest gradient is {fit.history[-1][1]:.3g} after {fit.num_iterations} iterations"
        remedy = "raise max_iterations, tolerance or l2" if fit.setting.l2 else f"{gap_report(fit)}; use l2 > 0"
        warnings.warn(f"the fit has not converged: {largest}; {remedy}", ConvergenceWarning, stacklevel=3)


def warn_unless_possible(fit: Fit) -> None:
    """Warn the caller about moments that no policy has: with a penalty, they also give finite weights."""
    room = UNMATCHED * max(float(np.abs(numbers).max()) for numbers in (fit.moments, fit.expected))
    if not (fit.converged and fit.setting.l2) or fit.gap <= room or (least := least_known_gap(fit)) <= room:
        return
    warnings.warn(
        f"no policy has these moments: the gap is {fit.gap:.3g}, and no policy's is below {least:.3g}. Give totals of"
        f" features per episode, at discount {fit.setting.discount} and from the world's start",
        stacklevel=3,
    )


def quick_program(setting: Setting) -> bool:
    return setting.horizon is None and setting.features.mdp.transitions.shape[0] <= QUICK_PAIRS


def least_known_gap(fit: Fit) -> float:
    """A lower bound of every policy's gap: the least gap where a linear program is quick, else by duality."""
    setting = fit.setting
    if quick_program(setting):
        with suppress(Divergence):
            return smallest_gap(setting, fit.moments)
    value = fit.point.value - setting.l2 / 2 * float(fit.weights @ fit.weights)
    return max(0.0, -value / float(np.abs(fit.weights).sum() or 1.0))


def gap_report(fit: Fit) -> str:
    """How close a fit without penalty gets to its moments, and how close any policy can get.

    Where the linear program is slow, or there is a horizon, duality bounds it: g(θ) is the most that any policy has of
    τ H(π) + θ·(E_π[φ] - μ), and entropy H is not negative, so no policy's gap is below -g(θ)/‖θ‖₁.
    """
    said = f"with l2 = 0 there may be no finite weights, and these go up to {np.abs(fit.weights).max():.3g}"
    if not fit.objective.convex:
        return said
    said += f"; the gap is {fit.gap:.3g}"
    if quick_program(fit.setting):
        try:
            return f"{said}, the least that any policy can reach {smallest_gap(fit.setting, fit.moments):.3g}"
        except Divergence as error:
            return f"{said} ({error})"
    if fit.point.value < 0:
        said += f", and no policy comes nearer than {-fit.point.value / np.abs(fit.weights).sum():.3g}"
    return said
