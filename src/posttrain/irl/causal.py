"""Maximum causal entropy inverse RL: the reward under which soft planning behaves as the demonstrations do."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.errors import UserError, require
from posttrain.irl.counting import action_counts, check_whole, count, in_world, initial_histogram
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.feasibility import feasible_start
from posttrain.irl.fitting import Fit, fitted
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.objectives import Dual, Likelihood, Plan, PlannedObjective, Setting
from posttrain.irl.planning import check_discount
from posttrain.irl.rewards import Features, LinearReward, Weights
from posttrain.irl.solvers import Descent, Point, minimise_lbfgs, minimise_newton


@dataclass(frozen=True, kw_only=True)
class MaxCausalEntIRL:
    """Settings of a fit; `fit` takes demonstrations, `fit_moments` the features that a policy should have."""

    objective: Literal["dual", "likelihood"] = "dual"
    """"dual": convex, matches features.  "likelihood": makes the demonstrated actions likely; not convex in general."""
    discount: float = 1.0
    """At 1 every episode must be able to end."""
    temperature: float = 1.0
    """How much entropy is worth, in units of reward: the lower, the greedier the policy that is fitted."""
    horizon: int | None = None
    """Actions in an episode at most; None is without limit."""
    l2: float = 1e-3
    """Penalty (l2/2)‖θ‖².  With 0, features that no policy can match have no finite weights."""
    solver: Literal["newton", "lbfgs"] = "newton"
    """Newton takes about ten steps; above some 300 weights its Hessian costs more than L-BFGS's hundreds."""
    tolerance: float = 1e-8
    """Largest entry of the gradient at which the fit is done."""
    max_iterations: int = 5000

    def __post_init__(self) -> None:
        require(self.objective in ("dual", "likelihood"), self, "objective", "is unknown; use 'dual' or 'likelihood'")
        require(self.solver in ("newton", "lbfgs"), self, "solver", "is unknown; use 'newton' or 'lbfgs'")
        require(self.horizon is None or self.horizon >= 1, self, "horizon", "leaves nothing to do; use >= 1 or None")
        require(0 <= self.l2 < np.inf, self, "l2", "is no penalty; use a number >= 0")
        require(0 < self.temperature < np.inf, self, "temperature", "is no temperature; use a number > 0")
        require(self.tolerance > 0, self, "tolerance", "is never reached; use a number > 0")
        check_discount(self.discount)

    def fit(self, mdp: TabularMDP, reward: LinearReward, demonstrations: Demonstrations) -> Fit:
        """The weights under which soft planning behaves as demonstrated, starting where the demonstrations start.

        The likelihood is minimised from the weights that match features, where the demonstrations have whole episodes.
        """
        features, known = reward.bound(mdp), in_world(demonstrations, mdp)
        setting = self.setting(features, initial_histogram(known, mdp.num_states))
        if self.objective == "dual":
            check_whole(known, mdp, discount=self.discount, horizon=self.horizon)
        counts = count(known, mdp, discount=self.discount)
        moments = features.observed(counts)
        actions = self.action_counts(known, mdp)
        if self.objective == "dual":
            return fitted(self.minimise(Dual(setting, moments)), setting, moments, actions, objective="dual")
        likelihood = Likelihood(setting, actions)
        found = self.minimise(likelihood, self.first_guess(known, setting, moments))
        return fitted(found, setting, moments, actions, objective="likelihood")

    def fit_moments(self, mdp: TabularMDP, reward: LinearReward, moments: Weights) -> Fit:
        """The same from exact features of a policy, per episode from the world's own start: the dual only."""
        if self.objective != "dual":
            raise UserError("objective = 'likelihood' needs demonstrations, not moments; use objective='dual'")
        features = reward.bound(mdp)
        if moments.shape != (features.num_features,) or not np.all(np.isfinite(moments)):
            raise UserError(f"moments {moments} must be {features.num_features} finite numbers, one for each feature")
        setting = self.setting(features, mdp.start)
        return fitted(self.minimise(Dual(setting, moments)), setting, moments, None, objective="dual")

    def setting(self, features: Features, start: Weights) -> Setting:
        return Setting(
            features=features,
            start=start,
            discount=self.discount,
            temperature=self.temperature,
            horizon=self.horizon,
            l2=self.l2,
        )

    def action_counts(self, known: Demonstrations, mdp: TabularMDP) -> np.ndarray:
        """Undiscounted, for every decision is as telling as any other."""
        if self.horizon is None:
            return count(known, mdp, discount=1.0).acting
        if known.lengths.max() > self.horizon:
            episode = int(known.lengths.argmax())
            raise UserError(
                f"demonstration {episode} has {known.lengths[episode]} actions; the horizon is {self.horizon}"
            )
        return action_counts(known, mdp, horizon=self.horizon)

    def first_guess(self, known: Demonstrations, setting: Setting, moments: Weights) -> Weights | None:
        """Where to start on the likelihood: the dual's minimum, or None where episodes are not whole."""
        try:
            check_whole(known, setting.features.mdp, discount=self.discount, horizon=self.horizon)
        except UserError:
            return None
        return self.minimise(Dual(setting, moments)).point.weights

    def minimise(self, objective: PlannedObjective, weights: Weights | None = None) -> Descent[Plan]:
        start: Point[Plan] = feasible_start(objective) if weights is None else objective.at(weights)
        minimise = minimise_newton if self.solver == "newton" else minimise_lbfgs
        return minimise(objective, start, tolerance=self.tolerance, max_iterations=self.max_iterations)
