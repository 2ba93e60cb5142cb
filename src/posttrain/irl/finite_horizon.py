"""Soft planning for a fixed number of actions; the policy depends on the time that is left.

    Q_t(s,a) = r(s,a) + γ Σ_s' P(s'|s,a) V_{t+1}(s')      V_t(s) = τ log Σ_a exp(Q_t(s,a)/τ)      V_H = 0

Actions are taken at t = 0 .. H-1, and H rewards are earned: where the horizon cuts an episode off, the state it has
reached pays nothing, but a terminal state pays on arrival even then, V_H(terminal) = r(terminal).  `imitation` 1.0.1
plans with H rewards too but counts H + 1 visits, so its gradient is off by the last.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.arguments import checked_integer, require_kind
from posttrain.irl.planning import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class FinitePlan:
    """The soft-optimal policy of each step."""

    problem: Problem
    values: Float[ndarray, "time state"]
    """V_0 to V_H."""
    policy: Float[ndarray, "horizon state action"]

    def visits(self, sources: Float[ndarray, "time state"]) -> Float[ndarray, "time state"]:
        """Discounted expected visits at each time when the mass sources[t] joins at time t and follows the policy."""
        mdp, discount = self.problem.mdp, self.problem.discount
        flow = sources.copy()
        for t, policy in enumerate(self.policy):
            flow[t + 1] += discount * (mdp.backward @ (policy * flow[t][:, None]).ravel())
        return flow


def soft_finite_horizon(problem: Problem, *, horizon: int) -> FinitePlan:
    """Plan backwards from the last action to the first: exact, whatever the discount."""
    horizon = checked_integer(horizon, "horizon", least=1)
    mdp = require_kind(problem, Problem, "problem").mdp
    values = np.empty((horizon + 1, mdp.num_states))
    policy = np.empty((horizon, mdp.num_states, mdp.num_actions))
    values[horizon] = problem.end_values
    for t in reversed(range(horizon)):
        values[t], policy[t] = problem.sweep(values[t + 1])
    return FinitePlan(problem=problem, values=values, policy=policy)
