"""Demonstrations and pairwise preferences fitted jointly: the bridge from inverse RL to reward models.

At discount 1 a soft-optimal agent in a deterministic world follows the path ζ with probability ∝ exp(R_θ(ζ)/τ), R_θ(ζ)
the rewards of the path.  So the odds of two paths from one start are Bradley & Terry's (1952), with the same θ:

    P(ζ ≻ ζ') = σ((R_θ(ζ) - R_θ(ζ'))/τ)

which is how reward models of language models are trained.  Taken as the model of a person who compares two paths, in
any world and with R_θ discounted as the fit is, it makes preferences a second, independent source on the same weights:

    g(θ) + (τ/N) Σ_pairs softplus(-θ·Δφ/τ),   g the dual of N demonstrations, Δφ = φ(ζ) - φ(ζ')

Both terms are convex.  At discount 1 in a deterministic world both are τ/N times a negative log-likelihood (the dual's
up to a constant), so that a comparison and a demonstration have the weight that their information gives them.
Preferences can settle what demonstrations cannot: the scale of what a goal is worth, when all reach it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.causal import MaxCausalEntIRL, warn_unless_converged
from posttrain.irl.counting import check_horizon, check_whole, discounted_counts, in_world, initial_histogram
from posttrain.irl.curvature import Matrix
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.features import LinearReward, Weights
from posttrain.irl.fitting import Fit, fit_of_descent
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.minimisers import Point, Watch
from posttrain.irl.objectives import Dual, Plan, Setting


@dataclass(frozen=True, eq=False)
class JointObjective:
    """The objective above."""

    dual: Dual
    differences: Float[ndarray, "pair feature"]
    """Features of the preferred path less those of the other."""
    num_demonstrations: int
    convex: bool = True

    @property
    def setting(self) -> Setting:
        return self.dual.setting

    def at(self, weights: Weights, guess: Plan | None = None) -> Point[Plan]:
        """The sum, its gradient and its Hessian."""
        point, tau = self.dual.at(weights, guess), self.setting.temperature
        margins = self.differences @ weights / tau
        share = 1 / self.num_demonstrations

        def bend() -> Matrix:
            return point.hessian + self.doubt_scatter(weights) / tau

        return Point(
            weights=weights,
            plan=point.plan,
            value=point.value + share * tau * float(np.logaddexp(0, -margins).sum()),
            gradient=point.gradient - share * self.differences.T @ self.doubts(weights),
            bend=bend,
        )

    def information(self, point: Point[Plan]) -> Matrix:
        """The Hessian without its penalty."""
        return self.dual.information(point) + self.doubt_scatter(point.weights) / self.setting.temperature

    def scatter(self, point: Point[Plan], known: Demonstrations) -> Matrix:
        """What the demonstrations add to the gradient, and the comparisons."""
        spread: Matrix = self.dual.scatter(point, known) + self.doubt_scatter(point.weights)
        return spread

    def doubts(self, weights: Weights) -> Float[ndarray, " pair"]:
        """The probability of the opposite of each preference, σ(-θ·Δφ/τ)."""
        opposite: ndarray = np.exp(-np.logaddexp(0, self.differences @ weights / self.setting.temperature))
        return opposite

    def doubt_scatter(self, weights: Weights) -> Matrix:
        """The covariance of what the comparisons add to the gradient, per demonstration: Σ σ(1 - σ) Δφ Δφᵀ / N."""
        doubts = self.doubts(weights)
        spread: Matrix = (self.differences * (doubts * (1 - doubts))[:, None]).T @ self.differences
        return spread / self.num_demonstrations


def fit_jointly(
    irl: MaxCausalEntIRL,
    mdp: TabularMDP,
    reward: LinearReward,
    demonstrations: Demonstrations,
    comparisons: tuple[Demonstrations, Demonstrations],
    *,
    watch: Watch | None = None,
) -> Fit:
    """Weights for which the demonstrations and the comparisons are both likely.

    `comparisons` are the preferred episodes and, in the same order, those that they were preferred to; episodes that
    were cut off may be compared as far as they go.
    """
    if irl.objective != "dual":
        raise UserError("objective = 'likelihood' is not convex; a joint fit needs objective='dual'")
    features, known = reward.bound(mdp), in_world(demonstrations, mdp)
    check_whole(known, mdp, discount=irl.discount, horizon=irl.horizon)
    setting = irl.setting(features, initial_histogram(known, mdp.num_states))
    moments = features.observed(discounted_counts(known, mdp, discount=irl.discount))
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
    differences = features.per_episode(preferred, irl.discount) - features.per_episode(others, irl.discount)
    joint = JointObjective(Dual(setting, moments), differences, len(known))
    fit = fit_of_descent(irl.minimise(joint, watch), joint, moments, irl.action_counts(known, mdp), len(known))
    warn_unless_converged(fit)
    return fit
