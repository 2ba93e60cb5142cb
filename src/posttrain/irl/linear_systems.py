"""The one linear system of a policy, I - γ P_π: solved, it looks forward in time; transposed, it looks backward."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.sparse import csc_array, csr_array

from posttrain.irl.linear_solvers import Solver, solver
from posttrain.irl.mdp import TabularMDP, reachable, sums_at


def policy_entries(mdp: TabularMDP, policy: Float[ndarray, "state action"]) -> Float[ndarray, " entry"]:
    """P_π(s'|s) = Σ_a π(a|s) P(s'|s,a), in the order of the pattern."""
    where, table = mdp.pattern, mdp.transitions
    weights = np.repeat(policy.ravel(), np.diff(table.indptr))
    weights *= table.data
    return sums_at(where.slot, weights, len(where.indices))


def next_state_table(mdp: TabularMDP, policy: Float[ndarray, "state action"]) -> csr_array:
    where, size = mdp.pattern, mdp.num_states
    return csc_array((policy_entries(mdp, policy), where.indices, where.indptr), shape=(size, size)).tocsr()


def always_ends(mdp: TabularMDP, policy: Float[ndarray, "state action"]) -> bool:
    """Whether the policy can reach a terminal state from everywhere."""
    edges = next_state_table(mdp, policy)
    edges.eliminate_zeros()
    return bool(reachable(edges.T.tocsr(), mdp.terminal).all())


def policy_system(mdp: TabularMDP, policy: Float[ndarray, "state action"], discount: float) -> Solver:
    """I - γ P_π, to be solved."""
    where, size = mdp.pattern, mdp.num_states
    entries = policy_entries(mdp, policy)
    entries *= -discount
    entries[where.diagonal] += 1
    return solver(csc_array((entries, where.indices, where.indptr), shape=(size, size)), wide=mdp.wide)


def resolvent(table: csr_array, *, wide: bool) -> Solver:
    """I - table, to be solved.

    Its diagonal is stored in full, zeros included: with an empty column SuperLU reads memory that it never wrote, and
    may end the process (xiaoyeli/superlu issue 33).
    """
    size = table.shape[0]
    rows, diagonal = np.repeat(np.arange(size), np.diff(table.indptr)), np.arange(size)
    places = (np.append(rows, diagonal), np.append(table.indices, diagonal))
    return solver(csc_array((np.append(-table.data, np.ones(size)), places), shape=table.shape), wide=wide)
