"""How often a policy visits each state: its occupancy measure, by one sparse solve or by finite sums."""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.arguments import (
    SHARE,
    Numbers,
    check_entries,
    checked_integer,
    checked_number,
    real_array,
    require_kind,
)
from posttrain.irl.divergence import Divergence
from posttrain.irl.linear_systems import next_state_table, policy_system
from posttrain.irl.mdp import SUM_TOLERANCE, Start, TabularMDP, check_start, reachable, start_distribution
from posttrain.irl.planning import UNBOUNDED, Policy

REMEDY = "Use a lower discount or a horizon"


def occupancy(mdp: TabularMDP, policy: Numbers, *, discount: float) -> Float[ndarray, " state"]:
    """Expected visits of each state, without horizon.

        D(s) = Σ_t γᵗ P(s_t = s),   D = (I - γ P_πᵀ)⁻¹ start

    At discount 1 a terminal state's entry is the probability of ending there, and the entries add up to the expected
    number of states in an episode, the last included.
    """
    start = require_kind(mdp, TabularMDP, "mdp").start
    return occupancy_from(mdp, policy, start, discount=discount)


def occupancy_from(mdp: TabularMDP, policy: Numbers, start: Start, *, discount: float) -> Float[ndarray, " state"]:
    """Expected visits of each state in episodes with another start."""
    checked_number(discount, "discount", SHARE)
    acting = policy_array(mdp, policy)
    starts = start_distribution(start, mdp.num_states)
    check_start(starts)
    if discount == 1:
        visited = visited_states(mdp, acting, starts)
        # Elsewhere it may go round for ever, and the matrix be singular.
        acting = np.where(visited[:, None], acting, 0.0)
    try:
        visits: ndarray = policy_system(mdp, acting, discount).solve(starts, "T")
    except Divergence as error:
        raise Divergence(f"occupancy diverges at discount {discount}: {error}. {REMEDY}") from error
    if not np.abs(visits).max() < UNBOUNDED:
        raise Divergence(
            f"occupancy diverges at discount {discount}: an episode of this policy visits some state {UNBOUNDED:.0e}"
            f" times or more. {REMEDY}"
        )
    return visits


def finite_occupancy(
    mdp: TabularMDP, policy: Numbers, *, discount: float, horizon: int
) -> Float[ndarray, "time state"]:
    """The same for each time from 0 to `horizon`, discounted: row t is γᵗ P(s_t = s), and zero once an episode is over.

    The policy may depend on time.  The last row holds episodes that continue after `horizon` actions, and those that
    have just ended.
    """
    checked_number(discount, "discount", SHARE)
    require_kind(mdp, TabularMDP, "mdp")
    horizon = checked_integer(horizon, "horizon", least=0)
    given = real_array(policy, "the policy")
    if given.ndim == 3 and len(given) != horizon:
        raise UserError(f"the policy is given for {len(given)} steps, and the horizon is {horizon}")
    steps = [policy_array(mdp, step) for step in given] if given.ndim == 3 else [policy_array(mdp, given)] * horizon
    visits = np.empty((horizon + 1, mdp.num_states))
    visits[0] = mdp.start
    for t, now in enumerate(steps):
        visits[t + 1] = discount * (mdp.backward @ (now * visits[t][:, None]).ravel())
    return visits


def visited_states(mdp: TabularMDP, policy: Policy, start: Float[ndarray, " state"]) -> Bool[ndarray, " state"]:
    """The states that a policy visits.  Raises Divergence where it never ends from one of them."""
    edges = next_state_table(mdp, policy)
    edges.eliminate_zeros()
    visited = reachable(edges, start > 0)
    stuck = np.flatnonzero(visited & ~reachable(edges.T.tocsr(), mdp.terminal))
    if stuck.size:
        state = mdp.states[stuck[0]]
        raise Divergence(f"occupancy diverges at discount 1: from state {state} this policy never ends. {REMEDY}")
    return visited


def policy_array(mdp: TabularMDP, given: Numbers) -> Policy:
    """A policy as an array, with a distribution over actions for every state that is not terminal."""
    require_kind(mdp, TabularMDP, "mdp")
    policy = real_array(given, "the policy")
    if policy.shape != (mdp.num_states, mdp.num_actions):
        raise UserError(f"the policy has the shape {policy.shape}; use {(mdp.num_states, mdp.num_actions)}")
    normal = (policy >= 0).all(axis=1) & (np.abs(policy.sum(axis=1) - 1) <= SUM_TOLERANCE)
    rule = "use numbers from 0 to 1, divided by their sum"
    check_entries(~normal & ~mdp.terminal, lambda i: f"policy of state {mdp.states[i]}: {policy[i]}; {rule}")
    return policy
