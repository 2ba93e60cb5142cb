"""Fits to pairwise preferences, with or without demonstrations: the bridge from inverse RL to reward models.

At discount 1 a soft-optimal agent in a deterministic world follows the path ζ with probability ∝ exp(R_θ(ζ)/τ), R_θ(ζ)
the rewards of the path.  So the odds of two paths from one start are Bradley & Terry's (1952), with the same θ:

    P(ζ ≻ ζ') = σ((R_θ(ζ) - R_θ(ζ'))/τ)

which is how reward models of language models are trained.  The same formula can model a person who compares two paths
in any world, with R_θ discounted as in the fit.  Preferences are then a second, independent source on the same weights:

    g(θ) + (τ/N) Σ_pairs softplus(-θ·Δφ/τ),   g the dual of N demonstrations, Δφ = φ(ζ) - φ(ζ')

Both terms are convex.  At discount 1 in a deterministic world both are τ/N times a negative log-likelihood (the dual's
up to a constant), so comparisons and demonstrations are weighted by their information.  Preferences can determine what
demonstrations cannot: how much a goal is worth if every demonstration reaches it.

Without demonstrations only the second term remains and N is the number of pairs, as for reward models.  Features that
both paths of every pair share are then not identified.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.arguments import brief_repr, check_entries, check_watch, require_kind
from posttrain.irl.causal import MaxCausalEntIRL, warn_unless_converged
from posttrain.irl.counting import check_horizon, check_whole, discounted_counts, in_world, start_shares
from posttrain.irl.curvature import Matrix
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import Features, LinearReward, Weights
from posttrain.irl.fitting import Fit, fit_of_descent
from posttrain.irl.linear_solvers import ConvergenceWarning
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Point, Watch, descend
from posttrain.irl.objectives import Dual, Plan, Setting
from posttrain.irl.planning import Reward

Differences = Float[ndarray, "pair feature"]
"""Features of each preferred path less those of the other."""
Pairs = tuple[Demonstrations, Demonstrations]
"""The preferred episodes and, in the same order, those that they were preferred to."""


@dataclass(frozen=True, eq=False)
class BradleyTerry:
    """The negative log-likelihood of preferences, times τ, and each with the weight `share`."""

    differences: Differences
    temperature: float
    share: float

    def margins(self, weights: Weights) -> Float[ndarray, " pair"]:
        """The log-odds of each preference, θ·Δφ/τ."""
        return np.asarray(self.differences @ weights / self.temperature)

    def doubts(self, weights: Weights) -> Float[ndarray, " pair"]:
        """The probability of the opposite of each preference, σ(-θ·Δφ/τ)."""
        return np.asarray(np.exp(-np.logaddexp(0, self.margins(weights))))

    def value(self, weights: Weights) -> float:
        return self.share * self.temperature * float(np.logaddexp(0, -self.margins(weights)).sum())

    def gradient(self, weights: Weights) -> Weights:
        return np.asarray(-self.share * self.differences.T @ self.doubts(weights))

    def scatter(self, weights: Weights) -> Matrix:
        """The covariance of what the comparisons add to the gradient, over N: Σ σ(1 - σ) Δφ Δφᵀ / N."""
        doubts = self.doubts(weights)
        return np.asarray(self.share * ((self.differences * (doubts * (1 - doubts))[:, None]).T @ self.differences))

    def hessian(self, weights: Weights) -> Matrix:
        return np.asarray(self.scatter(weights) / self.temperature)


@dataclass(frozen=True, eq=False)
class JointObjective:
    """The objective above."""

    dual: Dual
    differences: Differences
    num_demonstrations: int
    convex: bool = True

    @property
    def setting(self) -> Setting:
        return self.dual.setting

    @property
    def preferences(self) -> BradleyTerry:
        return BradleyTerry(self.differences, self.setting.temperature, 1 / self.num_demonstrations)

    def at(self, weights: Weights, guess: Plan | None = None) -> Point[Plan]:
        point, preferences = self.dual.at(weights, guess), self.preferences
        return Point(
            weights=weights,
            plan=point.plan,
            value=point.value + preferences.value(weights),
            gradient=point.gradient + preferences.gradient(weights),
            bend=lambda: point.hessian + preferences.hessian(weights),
        )

    def information(self, point: Point[Plan]) -> Matrix:
        return np.asarray(self.dual.information(point) + self.preferences.hessian(point.weights))

    def scatter(self, point: Point[Plan], known: Demonstrations) -> Matrix:
        return np.asarray(self.dual.scatter(point, known) + self.preferences.scatter(point.weights))


@dataclass(frozen=True, eq=False)
class PreferenceObjective:
    """(τ/N) Σ_pairs softplus(-θ·Δφ/τ) + (l2/2)‖θ‖²: convex, and nothing is planned."""

    setting: Setting
    differences: Differences
    watch: Watch | None = None

    @property
    def preferences(self) -> BradleyTerry:
        return BradleyTerry(self.differences, self.setting.temperature, 1 / len(self.differences))

    def at(self, weights: Weights, guess: None = None) -> Point[None]:
        preferences, l2 = self.preferences, self.setting.l2
        point: Point[None] = Point(
            weights=weights,
            plan=None,
            value=preferences.value(weights) + l2 / 2 * float(weights @ weights),
            gradient=preferences.gradient(weights) + l2 * weights,
            bend=lambda: preferences.hessian(weights) + l2 * np.eye(len(weights)),
        )
        if self.watch is not None:
            self.watch(point.numbers)
        return point


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceFit:
    """The result of a fit to preferences only.  It has no policy: at discount 1 the reward may make none."""

    weights: Weights
    reward: Reward
    """θ · φ, per state or per state and action."""
    log_likelihood: float
    """Mean log-probability of the stated preferences, in nats; a guess has log ½."""
    agreement: float
    """The share of comparisons in which the preferred path has the larger reward."""
    converged: bool
    history: tuple[tuple[float, float], ...]
    """Objective and largest gradient entry, features in units of their size, at the start and after
    each iteration."""
    objective: PreferenceObjective

    @property
    def setting(self) -> Setting:
        return self.objective.setting

    @property
    def information(self) -> Matrix:
        """Curvature of the objective from the comparisons, without its penalty."""
        return self.objective.preferences.hessian(self.weights)


def fit_preferences(
    irl: MaxCausalEntIRL, mdp: TabularMDP, reward: LinearReward, comparisons: Pairs, *, watch: Watch | None = None
) -> PreferenceFit:
    """Weights for which the comparisons are likely, without demonstrations.

    Uses the discount, temperature, horizon, penalty and solver of `irl`.  Where weights order all comparisons as
    stated, larger ones fit better without limit: with l2 = 0 that is a warning, and `converged` is false.
    """
    check_watch(watch)
    require_dual(irl)
    features = require_kind(reward, LinearReward, "reward").bound(mdp)
    differences = feature_differences(irl, features, comparisons)
    objective = PreferenceObjective(irl.setting(features, mdp.start), differences, watch)
    start = objective.at(np.zeros(features.num_features))
    found = descend(objective, start, features.units, irl.solver, tolerance=irl.tolerance, most=irl.max_iterations)
    weights, margins = found.point.weights, objective.preferences.margins(found.point.weights)
    endless = irl.l2 == 0 and bool(np.all(margins >= 0) and np.any(margins > 0))
    if endless or not found.converged:
        remedy = "no finite weights are the likeliest: larger ones order all comparisons more surely; use l2 > 0"
        warnings.warn(
            f"the fit has not converged: {remedy if endless else 'raise max_iterations, tolerance or l2'}",
            ConvergenceWarning,
            stacklevel=2,
        )
    return PreferenceFit(
        weights=weights,
        reward=objective.setting.paid(weights),
        log_likelihood=-float(np.logaddexp(0, -margins).mean()),
        agreement=float((margins > 0).mean()),
        converged=found.converged and not endless,
        history=found.history,
        objective=objective,
    )


def fit_jointly(
    irl: MaxCausalEntIRL,
    mdp: TabularMDP,
    reward: LinearReward,
    demonstrations: Demonstrations,
    comparisons: Pairs,
    *,
    watch: Watch | None = None,
) -> Fit:
    """Weights for which the demonstrations and the comparisons are both likely.

    `comparisons` are the preferred episodes and, in the same order, those that they were preferred to.  Truncated
    episodes may be compared.
    """
    require_dual(irl)
    features = require_kind(reward, LinearReward, "reward").bound(mdp)
    known = in_world(demonstrations, mdp)
    check_whole(known, mdp, discount=irl.discount, horizon=irl.horizon)
    setting = irl.setting(features, start_shares(known, mdp.num_states))
    moments = features.observed(discounted_counts(known, mdp, discount=irl.discount))
    joint = JointObjective(Dual(setting, moments), feature_differences(irl, features, comparisons), len(known))
    fit = fit_of_descent(irl.minimise(joint, watch), joint, moments, irl.action_counts(known, mdp), len(known))
    warn_unless_converged(fit)
    return fit


def require_dual(irl: MaxCausalEntIRL) -> None:
    if require_kind(irl, MaxCausalEntIRL, "irl").objective != "dual":
        raise UserError("objective = 'likelihood' is not convex and needs demonstrations: use objective='dual'")


def feature_differences(irl: MaxCausalEntIRL, features: Features, comparisons: Pairs) -> Differences:
    """Features of each preferred path less those of the other."""
    if not isinstance(comparisons, tuple | list) or len(comparisons) != 2:
        raise UserError(f"comparisons is {brief_repr(comparisons)}: give two, the preferred episodes and the others")
    mdp = features.mdp
    preferred, others = (in_world(episodes, mdp) for episodes in comparisons)
    if len(preferred) != len(others):
        raise UserError(f"{len(preferred)} preferred episodes for {len(others)} others: give them in pairs")
    first, second = (mdp.states[episodes.states[episodes.first_visits]] for episodes in (preferred, others))
    rule = "give paths from the same start"
    check_entries(first != second, lambda i: f"comparison {i} starts in states {first[i]} and {second[i]}; {rule}")
    for side, episodes in (("preferred", preferred), ("other", others)):
        check_horizon(episodes, irl.horizon, f"the {side} episode of comparison")
    return np.asarray(features.per_episode(preferred, irl.discount) - features.per_episode(others, irl.discount))
