"""How often a policy visits each state: its occupancy measure, by one sparse solve or by finite sums."""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.linear_systems import factorised, next_state_table
from posttrain.irl.mdp import TabularMDP, reachable
from posttrain.irl.planning import Divergence, Policy, check_discount

SUM_TOLERANCE = 1e-8


def occupancy(mdp: TabularMDP, policy: Policy, *, discount: float) -> Float[ndarray, " state"]:
    """Expected visits of each state, without horizon.

        D(s) = Σ_t γᵗ P(s_t = s),   D = (I - γ P_πᵀ)⁻¹ start

    At discount 1 a terminal state's entry is the probability of ending there, and the entries add up to the expected
    number of states in an episode, the last included.
    """
    return occupancy_from(mdp, policy, mdp.start, discount=discount)


def occupancy_from(
    mdp: TabularMDP, policy: Policy, start: Float[ndarray, " state"], *, discount: float
) -> Float[ndarray, " state"]:
    """The same for episodes that start elsewhere."""
    check_discount(discount)
    check_policy(mdp, policy)
    if discount == 1:
        visited = visited_states(mdp, policy, start)
        policy = np.where(visited[:, None], policy, 0.0)  # elsewhere it may go round for ever
    visits: ndarray = factorised(mdp, policy, discount).solve(start, "T")
    return visits


def finite_occupancy(
    mdp: TabularMDP, policy: Policy | Float[ndarray, "horizon state action"], *, discount: float, horizon: int
) -> Float[ndarray, "time state"]:
    """The same for each time from 0 to `horizon`, discounted: row t is γᵗ P(s_t = s), and zero once an episode is over.

    The policy may depend on time.  The last row holds those still under way after `horizon` actions, and those who
    have just ended.
    """
    check_discount(discount)
    stationary = policy.ndim == 2
    if not stationary and len(policy) != horizon:
        raise UserError(f"the policy is given for {len(policy)} steps, and the horizon is {horizon}")
    visits = np.empty((horizon + 1, mdp.num_states))
    visits[0] = mdp.start
    for t in range(horizon):
        now = policy if stationary else policy[t]
        visits[t + 1] = discount * (mdp.backward @ (now * visits[t][:, None]).ravel())
    return visits


def visited_states(mdp: TabularMDP, policy: Policy, start: Float[ndarray, " state"]) -> Bool[ndarray, " state"]:
    """The states that a policy ever visits; raises Divergence where it may go on for ever from one of them."""
    edges = next_state_table(mdp, policy)
    edges.eliminate_zeros()
    visited = reachable(edges, start > 0)
    stuck = np.flatnonzero(visited & ~reachable(edges.T.tocsr(), mdp.terminal))
    if stuck.size:
        raise Divergence(
            f"occupancy diverges at discount 1: from state {mdp.states[stuck[0]]} this policy never ends an episode. "
            "Use a lower discount or a horizon"
        )
    return visited


def check_policy(mdp: TabularMDP, policy: Policy) -> None:
    """Refuse numbers that are no distribution over actions, naming the state."""
    if policy.shape != (mdp.num_states, mdp.num_actions):
        raise UserError(f"the policy has the shape {policy.shape}; use {(mdp.num_states, mdp.num_actions)}")
    wrong = np.flatnonzero(~((policy >= 0).all(axis=1) & (np.abs(policy.sum(axis=1) - 1) <= SUM_TOLERANCE)))
    wrong = wrong[~mdp.terminal[wrong]]
    if wrong.size:
        raise UserError(f"policy: the probabilities of state {mdp.states[wrong[0]]} are {policy[wrong[0]]}")
