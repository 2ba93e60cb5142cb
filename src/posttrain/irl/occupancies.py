"""How often a policy visits each state: its occupancy measure, by one sparse solve or by finite sums."""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.arguments import Numbers, checked_integer, real_array, require_kind
from posttrain.irl.divergence import Divergence
from posttrain.irl.linear_systems import next_state_table, policy_system
from posttrain.irl.mdp import SUM_TOLERANCE, Start, TabularMDP, check_start, reachable, start_distribution
from posttrain.irl.planning import UNBOUNDED, Policy, check_discount


def occupancy(mdp: TabularMDP, policy: Numbers, *, discount: float) -> Float[ndarray, " state"]:
    """Expected visits of each state, without horizon.

        D(s) = Σ_t γᵗ P(s_t = s),   D = (I - γ P_πᵀ)⁻¹ start

    At discount 1 a terminal state's entry is the probability of ending there, and the entries add up to the expected
    number of states in an episode, the last included.
    """
    start = require_kind(mdp, TabularMDP, "mdp").start
    return occupancy_from(mdp, policy, start, discount=discount)


def occupancy_from(mdp: TabularMDP, policy: Numbers, start: Start, *, discount: float) -> Float[ndarray, " state"]:
    """Expected visits of each state in episodes that start elsewhere than the world's."""
    check_discount(discount)
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
        said = f"occupancy diverges at discount {discount}: {error}"
        raise Divergence(f"{said}. Use a lower discount or a horizon") from error
    if not np.abs(visits).max() < UNBOUNDED:
        raise infinite_occupancy(discount)
    return visits


def finite_occupancy(
    mdp: TabularMDP, policy: Numbers, *, discount: float, horizon: int
) -> Float[ndarray, "time state"]:
    """The same for each time from 0 to `horizon`, discounted: row t is γᵗ P(s_t = s), and zero once an episode is over.

    The policy may depend on time.  The last row holds those still under way after `horizon` actions, and those who
    have just ended.
    """
    check_discount(discount)
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
    """The states that a policy visits; refuses one that may go on for ever from any of them."""
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


def infinite_occupancy(discount: float) -> Divergence:
    """The error for a policy that hardly ever ends an episode."""
    return Divergence(
        f"occupancy diverges at discount {discount}: an episode of this policy visits some state {UNBOUNDED:.0e} times "
        "or more, which double precision cannot tell from for ever. Use a lower discount or a horizon"
    )


def policy_array(mdp: TabularMDP, given: Numbers) -> Policy:
    """A policy as an array; refuses numbers that are no distribution over actions, naming the state."""
    require_kind(mdp, TabularMDP, "mdp")
    policy = real_array(given, "the policy")
    if policy.shape != (mdp.num_states, mdp.num_actions):
        raise UserError(f"the policy has the shape {policy.shape}; use {(mdp.num_states, mdp.num_actions)}")
    wrong = np.flatnonzero(~((policy >= 0).all(axis=1) & (np.abs(policy.sum(axis=1) - 1) <= SUM_TOLERANCE)))
    wrong = wrong[~mdp.terminal[wrong]]
    if wrong.size:
        raise UserError(
            f"policy: the probabilities of state {mdp.states[wrong[0]]} are {policy[wrong[0]]}; "
            "use numbers from 0 to 1, divided by their sum"
        )
    return policy
