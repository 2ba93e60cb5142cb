"""Pairwise preferences fitted, alone or jointly with demonstrations: the bridge from inverse RL to reward models.

At discount 1 a soft-optimal agent in a deterministic world follows the path ζ with probability ∝ exp(R_θ(ζ)/τ), R_θ(ζ)
the rewards of the path.  So the odds of two paths from one start are Bradley & Terry's (1952), with the same θ:

    P(ζ ≻ ζ') = σ((R_θ(ζ) - R_θ(ζ'))/τ)

which is how reward models of language models are trained.  Taken as the model of a person who compares two paths, in
any world and with R_θ discounted as the fit is, it makes preferences a second, independent source on the same weights:

    g(θ) + (τ/N) Σ_pairs softplus(-θ·Δφ/τ),   g the dual of N demonstrations, Δφ = φ(ζ) - φ(ζ')

Both terms are convex.  At discount 1 in a deterministic world both are τ/N times a negative log-likelihood (the dual's
up to a constant), so that a comparison and a demonstration have the weight that their information gives them.
Preferences can settle what demonstrations cannot: the scale of what a goal is worth, when all reach it.

Without demonstrations the second term stands alone, N then the number of pairs: so are reward models fitted.  What both
paths of every pair have alike is then not identified.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.arguments import brief_repr, check_watch, require_kind
from posttrain.irl.causal import MaxCausalEntIRL, warn_unless_converged
from posttrain.irl.counting import check_horizon, check_whole, discounted_counts, in_world, initial_histogram
from posttrain.irl.curvature import Matrix
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.divergence import ConvergenceWarning
from posttrain.irl.features import Features, LinearReward, Weights
from posttrain.irl.fitting import Fit, fit_of_descent
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Point, Watch
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
        odds: ndarray = self.differences @ weights / self.temperature
        return odds

    def doubts(self, weights: Weights) -> Float[ndarray, " pair"]:
        """The probability of the opposite of each preference, σ(-θ·Δφ/τ)."""
        opposite: ndarray = np.exp(-np.logaddexp(0, self.margins(weights)))
        return opposite

    def value(self, weights: Weights) -> float:
        return self.share * self.temperature * float(np.logaddexp(0, -self.margins(weights)).sum())

    def gradient(self, weights: Weights) -> Weights:
        slope: Weights = -self.share * self.differences.T @ self.doubts(weights)
        return slope

    def scatter(self, weights: Weights) -> Matrix:
        """The covariance of what the comparisons add to the gradient, over N: Σ σ(1 - σ) Δφ Δφᵀ / N."""
        doubts = self.doubts(weights)
        spread: Matrix = (self.differences * (doubts * (1 - doubts))[:, None]).T @ self.differences
        shared: Matrix = self.share * spread
        return shared

    def hessian(self, weights: Weights) -> Matrix:
        bend: Matrix = self.scatter(weights) / self.temperature
        return bend


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
        """The sum, its gradient and its Hessian."""
        point, preferences = self.dual.at(weights, guess), self.preferences
        return Point(
            weights=weights,
            plan=point.plan,
            value=point.value + preferences.value(weights),
            gradient=point.gradient + preferences.gradient(weights),
            bend=lambda: point.hessian + preferences.hessian(weights),
        )

    def information(self, point: Point[Plan]) -> Matrix:
        """The Hessian without its penalty."""
        bend: Matrix = self.dual.information(point) + self.preferences.hessian(point.weights)
        return bend

    def scatter(self, point: Point[Plan], known: Demonstrations) -> Matrix:
        """What the demonstrations add to the gradient, and the comparisons."""
        spread: Matrix = self.dual.scatter(point, known) + self.preferences.scatter(point.weights)
        return spread


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
        """The sum, its gradient and its Hessian."""
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
    """What preferences alone say of a reward.  No policy: at discount 1 the reward may make none."""

    weights: Weights
    reward: Reward
    """θ · φ, per state or per state and action."""
    log_likelihood: float
    """Mean log-probability of the stated preferences, in nats; log ½ is that of a guess."""
    agreement: float
    """The share of comparisons in which the preferred path has the larger reward."""
    converged: bool
    history: tuple[tuple[float, float], ...]
    """Objective and largest gradient entry, features in units of their size, at the start and after
    each iteration."""
    objective: PreferenceObjective

    @property
    def setting(self) -> Setting:
        """With the discount, temperature and penalty of the fit."""
        return self.objective.setting

    @property
    def information(self) -> Matrix:
        """The curvature that the comparisons give the objective, without its penalty."""
        return self.objective.preferences.hessian(self.weights)


def fit_preferences(
    irl: MaxCausalEntIRL, mdp: TabularMDP, reward: LinearReward, comparisons: Pairs, *, watch: Watch | None = None
) -> PreferenceFit:
    """Weights for which the comparisons are likely, without a demonstration.

    Of `irl` the discount, temperature, horizon, penalty and solver count.  Where weights order all comparisons as
    stated, larger ones do so more surely without end: with l2 = 0 that is a warning, and `converged` is false.
    """
    require_kind(irl, MaxCausalEntIRL, "irl")
    check_watch(watch)
    if irl.objective != "dual":
        raise UserError("objective = 'likelihood' needs demonstrations; preferences are fitted with objective='dual'")
    features = require_kind(reward, LinearReward, "reward").bound(mdp)
    differences = feature_differences(irl, features, comparisons)
    objective = PreferenceObjective(irl.setting(features, mdp.start), differences, watch)
    found = irl.descend(objective, objective.at(np.zeros(features.num_features)), features.units)
    weights, margins = found.point.weights, objective.preferences.margins(found.point.weights)
    endless = irl.l2 == 0 and bool(np.all(margins >= 0) and np.any(margins > 0))
    if endless or not found.converged:
        remedy = "no finite weights are the likeliest, since larger ones order all comparisons more surely; use l2 > 0"
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

    `comparisons` are the preferred episodes and, in the same order, those that they were preferred to; episodes that
    were cut off may be compared as far as they go.
    """
    require_kind(irl, MaxCausalEntIRL, "irl")
    if irl.objective != "dual":
        raise UserError("objective = 'likelihood' is not convex; a joint fit needs objective='dual'")
    features = require_kind(reward, LinearReward, "reward").bound(mdp)
    known = in_world(demonstrations, mdp)
    check_whole(known, mdp, discount=irl.discount, horizon=irl.horizon)
    setting = irl.setting(features, initial_histogram(known, mdp.num_states))
    moments = features.observed(discounted_counts(known, mdp, discount=irl.discount))
    joint = JointObjective(Dual(setting, moments), feature_differences(irl, features, comparisons), len(known))
    fit = fit_of_descent(irl.minimise(joint, watch), joint, moments, irl.action_counts(known, mdp), len(known))
    warn_unless_converged(fit)
    return fit


def feature_differences(irl: MaxCausalEntIRL, features: Features, comparisons: Pairs) -> Differences:
    """Features of each preferred path less those of the other; refuses paths that cannot be compared."""
    if not isinstance(comparisons, tuple | list) or len(comparisons) != 2:
        raise UserError(f"comparisons is {brief_repr(comparisons)}: give two, the preferred episodes and the others")
    mdp = features.mdp
    preferred, others = (in_world(episodes, mdp) for episodes in comparisons)
    if len(preferred) != len(others):
        raise UserError(f"{len(preferred)} preferred episodes for {len(others)} others: give them in pairs")
    starts = [episodes.states[episodes.first_visits] for episodes in (preferred, others)]
    apart = np.flatnonzero(starts[0] != starts[1])
    if apart.size:
        raise UserError(
            f"comparison {apart[0]}: the episodes start in states {mdp.states[starts[0][apart[0]]]} and "
            f"{mdp.states[starts[1][apart[0]]]}; only paths from the same start have such odds"
        )
    for side, episodes in (("preferred", preferred), ("other", others)):
        check_horizon(episodes, irl.horizon, f"the {side} episode of comparison")
    difference: Differences = features.per_episode(preferred, irl.discount) - features.per_episode(others, irl.discount)
    return difference
