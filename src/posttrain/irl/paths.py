"""The partition function over paths of Ziebart et al. 2008, exactly: absorbing, in log space, by sparse solves.

    P(ζ) ∝ exp(Σ_t r(s_t)) Π_t P(s_{t+1}|s_t,a_t)      Z(s) = e^{r(s)} Σ_a,s' P(s'|s,a) Z(s'),   Z(end) = e^{r(end)}

With V = log Z this is planning in a world where one chooses the next state outright, and W(s,s') = Σ_a P(s'|s,a) says
the total probability over actions:

    V(s) = r(s) + log Σ_s' W(s,s') e^{V(s')}      q(s'|s) = W(s,s') e^{V(s') - V(s) + r(s)}

so Newton's method solves it as it solves soft planning, and nothing is ever exponentiated that could overflow.  q are
the dynamics tilted by Z(s')/Z(s): visits under q are the gradient of V(start).  Algorithm 1 of the paper counts visits
under the true dynamics instead, which is the same only where these are deterministic.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError
from posttrain.irl.arguments import Numbers, shaped_array
from posttrain.irl.curvature import BLOCK, Matrix
from posttrain.irl.linear_solvers import Divergence, Solver
from posttrain.irl.linear_systems import policy_system, resolvent
from posttrain.irl.mdp import TabularMDP, state_graph
from posttrain.irl.planning import MAX_SOLVES, UNBOUNDED, Policy, newton_converged, reward_array

PerState = Float[ndarray, " state"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PathPlan:
    """The partition function of every state, and what follows from it."""

    mdp: TabularMDP
    values: PerState
    """log Z."""
    following: csr_array
    """q(s'|s), rows of terminal states empty."""
    system: Solver
    """I - q."""

    def visits(self, start: PerState) -> PerState:
        """Expected visits under the model's own paths: the gradient of start · V with respect to r."""
        return self.system.solve(start, "T")

    def policy(self) -> Policy:
        """How much of the partition goes through each action, P(a|s) = Σ_s' P(s'|s,a) Z(s') e^{r(s)} / Z(s)."""
        table, num_actions = self.mdp.transitions, self.mdp.num_actions
        rows = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
        best = np.full(self.mdp.num_states, -np.inf)
        np.maximum.at(best, rows // num_actions, self.values[table.indices])
        shares = table.data * np.exp(self.values[table.indices] - best[rows // num_actions])
        through = np.bincount(rows, shares, minlength=table.shape[0]).reshape(-1, num_actions)
        through[self.mdp.terminal] = 1
        policy: Policy = through / through.sum(axis=1, keepdims=True)
        return policy


def tilted_outcomes(plan: PathPlan) -> csr_array:
    """What an action leads to on the model's own paths: P(s'|s,a) tilted by Z(s')."""
    table = plan.mdp.transitions
    rows = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    best = np.full(table.shape[0], -np.inf)
    np.maximum.at(best, rows, plan.values[table.indices])
    shares = table.data * np.exp(plan.values[table.indices] - best[rows])
    shares /= np.bincount(rows, shares, minlength=table.shape[0])[rows]
    return csr_array((shares, table.indices, table.indptr), shape=table.shape)


def path_partition(mdp: TabularMDP, reward: Numbers, *, guess: Numbers | None = None) -> PathPlan:
    """Solve for V from the uniform choice of actions, or from a `guess` where that leads somewhere.

    Raises Divergence if the sum over paths is infinite: a loop whose rewards do not outweigh its many ways.
    """
    paid, choices = reward_array(mdp, reward), merged_choices(mdp)
    if paid.ndim != 1:
        raise UserError(f"the reward has the shape {paid.shape}: give the path model a reward of states")
    if guess is not None:
        near_by = shaped_array(guess, "guess", paid.shape)
        try:
            return solve_partition(mdp, choices, paid, np.where(mdp.terminal, paid, near_by))
        except Divergence:
            pass  # the uniform choice cannot mislead
    lost = mdp.never_ending()
    if lost.size:
        raise Divergence(f"the partition function is infinite: state {mdp.states[lost[0]]} can never reach an end")
    uniform = csr_array((choices.data / mdp.num_actions, choices.indices, choices.indptr), shape=choices.shape)
    worth = np.where(mdp.terminal, paid, paid + np.log(mdp.num_actions))
    try:
        first = resolvent(uniform, wide=mdp.wide).solve(worth)
    except Divergence as error:
        raise infinite_partition(paid) from error
    return solve_partition(mdp, choices, paid, first)


def solve_partition(mdp: TabularMDP, choices: csr_array, reward: PerState, values: PerState) -> PathPlan:
    """V ← V + (I - q)⁻¹ (T V - V), where T V is the right-hand side of its equation."""
    before, scale = np.inf, max(float(np.abs(reward).max()), float(np.log(mdp.num_actions)), 1e-300)
    for _ in range(MAX_SOLVES):
        updated, following = tilted_dynamics(choices, reward, values)
        try:
            onwards = resolvent(following, wide=mdp.wide)
            left_over = updated - values
            step = onwards.solve(left_over)
        except Divergence as error:
            raise infinite_partition(reward) from error
        values = values + step
        moved, largest = float(np.abs(step).max()), float(np.abs(values).max())
        if not largest < UNBOUNDED * scale:
            break
        if newton_converged(left_over, moved, before, largest=largest, scale=scale):
            if not onwards.solve(np.ones(len(values))).max() < UNBOUNDED:
                break
            return PathPlan(mdp=mdp, values=values, following=following, system=onwards)
        before = moved
    raise infinite_partition(reward)


def merged_choices(mdp: TabularMDP) -> csr_array:
    """W: the ways from each state to each next one, over all actions."""
    choices = state_graph(mdp).copy()
    choices.sum_duplicates()
    return choices


def tilted_dynamics(choices: csr_array, reward: PerState, values: PerState) -> tuple[PerState, csr_array]:
    """The right-hand side of V's equation, and q; in terminal states V is the reward."""
    going_on = np.flatnonzero(np.diff(choices.indptr))
    first = choices.indptr[going_on]
    lengths = np.diff(choices.indptr)
    exponents = np.log(choices.data) + values[choices.indices]
    best = np.maximum.reduceat(exponents, first)
    shares = np.exp(exponents - np.repeat(best, lengths[going_on]))
    total = np.add.reduceat(shares, first)
    shares /= np.repeat(total, lengths[going_on])
    updated = reward.copy()
    updated[going_on] += best + np.log(total)
    return updated, csr_array((shares, choices.indices, choices.indptr), shape=choices.shape)


def path_curvature(plan: PathPlan, features: Float[ndarray, "state feature"], visits: PerState) -> Matrix:
    """The second derivative of start · V: Σ_s visits(s) Cov_{s'∼q}(ψ(s')), with ψ = (I - q)⁻¹ φ."""
    successors = plan.system.solve(features)
    means = plan.following @ successors
    edges = plan.following
    source = np.repeat(np.arange(len(visits)), np.diff(edges.indptr))
    total = np.zeros((features.shape[1], features.shape[1]))
    for first in range(0, edges.nnz, 4 * BLOCK):
        part = slice(first, first + 4 * BLOCK)
        spread = successors[edges.indices[part]] - means[source[part]]
        total += (spread * (visits[source[part]] * edges.data[part])[:, None]).T @ spread
    return (total + total.T) / 2


def executed_slopes(plan: PathPlan, features: Float[ndarray, "state feature"], start: PerState) -> Matrix:
    """How the visits of the policy under the true dynamics move with the weights: ∂(Φᵀ D)_k/∂θ_l, not symmetric.

        Σ_s D(s) Cov_{a∼P(a|s)}(E[ψ_k(s')|s,a], E_q[χ_l(s')|s,a])      ψ = (I - P_π)⁻¹ φ      χ = (I - q)⁻¹ φ

    ψ is what follows in the world and χ = ∂V/∂θ what follows on the model's own paths, on which s' is tilted by Z(s').
    """
    mdp, policy, outcomes = plan.mdp, plan.policy(), tilted_outcomes(plan)
    executed = policy_system(mdp, policy, 1.0)
    flow = executed.solve(start, "T")[:, None] * policy
    real, hoped = executed.solve(features), plan.system.solve(features)
    total = np.zeros((features.shape[1], features.shape[1]))
    for first in range(0, mdp.num_states, BLOCK):
        here = policy[first : first + BLOCK]
        rows = slice(first * mdp.num_actions, (first + len(here)) * mdp.num_actions)
        slopes = (outcomes[rows] @ hoped).reshape(*here.shape, -1)
        slopes -= np.matmul(here[:, None, :], slopes)
        follows = (mdp.transitions[rows] @ real) * flow[first : first + BLOCK].reshape(-1, 1)
        total += follows.T @ slopes.reshape(len(follows), -1)
    return total


def infinite_partition(reward: PerState) -> Divergence:
    return Divergence(
        "the partition function over paths is infinite, or too large for double precision, at discount 1 and rewards"
        f" {reward.min():.3g} to {reward.max():.3g}. Lower the rewards, or use MaxCausalEntIRL with a discount below 1"
    )
