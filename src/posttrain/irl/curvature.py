"""How a soft-optimal policy changes with the weights: covariances of the derivatives of Q.

With reward θ · φ, the derivative of the soft values is the successor features ψ = (I - γ P_π)⁻¹ φ_π, those of Q are
dQ(s,a) = φ(s,a) + γ Σ_s' P(s'|s,a) ψ(s'), and d²V = (I - γ P_π)⁻¹ Cov_π(dQ)/τ.  So every Hessian here is

    Σ_s flow(s) Cov_{a∼π(·|s)}(dQ(s,a))

with a flow of visits: the expected ones for the dual, minus the adjoint of the counts for the likelihood.
"""

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.features import Features, dense
from posttrain.irl.planning import FinitePlan, Policy, SoftPlan

BLOCK = 4096
"""Most states whose dQ are in memory at once."""

Successors = Float[ndarray, "state feature"]
Matrix = Float[ndarray, "feature feature"]


def curvature(plan: SoftPlan | FinitePlan, features: Features, flow: ndarray) -> Matrix:
    """The sum above; for a plan with a horizon it runs over times too."""
    if isinstance(plan, SoftPlan):
        return covariance(plan.policy, features, expected_from(plan, features), flow, plan.problem.discount)[0]
    total = np.zeros((features.num_features, features.num_features))
    ends = end_slopes(features)
    successors = ends
    for t in reversed(range(len(plan.policy))):
        bend, successors = covariance(plan.policy[t], features, successors, flow[t], plan.problem.discount)
        successors = successors + ends
        total += bend
    return total


def expected_from(plan: SoftPlan | FinitePlan, features: Features) -> Successors:
    if isinstance(plan, SoftPlan):
        return plan.system.solve(features.averaged(plan.policy))
    ends = end_slopes(features)
    successors, no_flow = ends, np.zeros(len(ends))
    for policy in plan.policy[::-1]:
        successors = covariance(policy, features, successors, no_flow, plan.problem.discount)[1] + ends
    return successors


def end_slopes(features: Features) -> Successors:
    """The derivative of V in terminal states; zero elsewhere."""
    mdp = features.mdp
    values = np.zeros((mdp.num_states, features.num_features))
    if features.on_arrival is not None:
        values[mdp.terminal] = dense(features.on_arrival[mdp.terminal])
    return values


def covariance(
    policy: Policy, features: Features, successors: Successors, flow: Float[ndarray, " state"], discount: float
) -> tuple[Matrix, Successors]:
    """Σ_s flow(s) Cov_π(dQ), and Σ_a π dQ, zero in terminal states."""
    mdp = features.mdp
    num_states, num_actions = policy.shape
    total = np.zeros((features.num_features, features.num_features))
    means = np.zeros_like(successors)
    acting = np.where(mdp.terminal[:, None], 0.0, policy)
    for first in range(0, num_states, BLOCK):
        last = min(first + BLOCK, num_states)
        rows = mdp.transitions[first * num_actions : last * num_actions]
        slopes = (rows @ successors).reshape(last - first, num_actions, -1)
        slopes *= discount
        slopes += features.block(first, last)
        here = acting[first:last]
        means[first:last] = np.matmul(here[:, None, :], slopes)[:, 0, :]
        slopes -= means[first:last, None, :]
        weights = (here * flow[first:last, None]).reshape(-1, 1)
        flat = slopes.reshape(-1, slopes.shape[-1])
        total += (flat * weights).T @ flat
    return (total + total.T) / 2, means
