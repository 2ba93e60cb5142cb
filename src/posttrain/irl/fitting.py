"""The result of a fit, and how far it can be trusted."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.curvature import Matrix
from posttrain.irl.features import Weights
from posttrain.irl.minimisers import Descent, Point
from posttrain.irl.objectives import InformativeObjective, Plan, Setting, log_likelihood
from posttrain.irl.planning import Reward, SoftPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Weights with everything that follows from them; each number belongs to `policy`, the one that is returned."""

    weights: Weights
    reward: Reward
    """θ · φ, per state or per state and action.

    Where ends have features too, their rewards are added, discounted, to the actions that lead there: with the fit's
    discount, this reward makes the same policy.
    """
    policy: Float[ndarray, "*horizon state action"]
    """π(a|s); with a horizon it depends on the time too."""
    values: Float[ndarray, "*time state"]
    expected: Weights
    """Features of an episode of the policy."""
    moments: Weights
    """Features of a demonstration, which `expected` should match."""
    num_demonstrations: int
    """Number of demonstrations; 0 for a fit to moments."""
    gap_error: float
    """The most by which rounding in the solves can have changed an entry of `expected`."""
    log_likelihood: float
    """Mean log π(a|s) of the demonstrated actions, in nats; NaN for a fit to moments."""
    converged: bool
    """Whether the gradient fell to the tolerance.  If not, and l2 = 0, there may be no weights that match these
    moments."""
    history: tuple[tuple[float, float], ...]
    """Objective and largest gradient entry, features in units of their size, at the start and after
    each iteration."""
    suboptimality: float
    """A convex objective is at most this far above its minimum, (‖∇‖ + rounding)²/(2·l2).

    Infinite for the likelihood, which is not convex, and with l2 = 0.  The dual then has another certificate: the
    policy is the one of most entropy for moments that differ by the gap.
    """
    objective: InformativeObjective
    """The minimised objective, with its data."""
    point: Point[Plan]
    """The objective there, with its Hessian."""

    @property
    def setting(self) -> Setting:
        return self.objective.setting

    @property
    def gap(self) -> float:
        """The largest difference between a feature of the policy and of the demonstrations."""
        return float(np.abs(self.expected - self.moments).max())

    @property
    def information(self) -> Matrix:
        """Curvature of the objective from the data, without its penalty."""
        return self.objective.information(self.point)

    @property
    def num_iterations(self) -> int:
        return len(self.history) - 1


def fit_of_descent(
    descent: Descent[Plan],
    objective: InformativeObjective,
    moments: Weights,
    actions: ndarray | None,
    num_demonstrations: int,
) -> Fit:
    """The fit at the last point of a minimisation."""
    point, setting = descent.point, objective.setting
    plan = point.plan
    visits = plan.visits(setting.sources())
    num_steps = 0.0 if actions is None else float(actions.sum())
    gap_error = visit_error(plan, visits, setting) * setting.features.largest
    gradient = float(np.linalg.norm(np.abs(point.gradient) + gap_error))
    certified = setting.l2 > 0 and objective.convex
    return Fit(
        weights=point.weights,
        reward=setting.paid(point.weights),
        policy=plan.policy,
        values=plan.values,
        expected=setting.totals(plan, visits),
        moments=moments,
        num_demonstrations=num_demonstrations,
        gap_error=gap_error,
        log_likelihood=log_likelihood(plan, actions) / num_steps if actions is not None and num_steps else float("nan"),
        converged=descent.converged,
        history=descent.history,
        suboptimality=gradient**2 / (2 * setting.l2) if certified else float("inf"),
        objective=objective,
        point=point,
    )


def visit_error(plan: Plan, visits: ndarray, setting: Setting) -> float:
    """A bound of the error in the sum of all visits: the residual of the solve, times the longest episode.

    With D' the computed and D the true visits, D' - D = (I - γ P_πᵀ)⁻¹ residual, and a column of that inverse adds up
    to the expected length of an episode from there.  Finite sums have no residual.
    """
    if not isinstance(plan, SoftPlan):
        return 0.0
    mdp = setting.features.mdp
    left_over = setting.start + setting.discount * (mdp.backward @ (plan.policy * visits[:, None]).ravel()) - visits
    longest = plan.system.solve(np.ones(mdp.num_states)).max()
    return float(np.abs(left_over).sum() * longest)
