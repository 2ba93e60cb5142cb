"""The one linear system of a policy, I - γ P_π: solved, it looks forward in time; transposed, it looks backward.

The matrix is diagonally dominant by rows with no positive entry off the diagonal (an M-matrix), so its factors need no
pivoting, and an ordering for symmetric patterns halves the fill on grids.
"""

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.sparse import csc_array, csr_array
from scipy.sparse.linalg import SuperLU, splu

from posttrain.irl.mdp import TabularMDP, reachable
from posttrain.irl.pattern import added_up


def merged(mdp: TabularMDP, policy: Float[ndarray, "state action"]) -> Float[ndarray, " entry"]:
    """P_π(s'|s) = Σ_a π(a|s) P(s'|s,a), in the order of the pattern."""
    where, table = mdp.pattern, mdp.transitions
    weights = np.repeat(policy.ravel(), np.diff(table.indptr))
    weights *= table.data
    return added_up(where.slot, weights, len(where.indices))


def next_state_table(mdp: TabularMDP, policy: Float[ndarray, "state action"]) -> csr_array:
    """P_π as a matrix, one row per state."""
    where, size = mdp.pattern, mdp.num_states
    return csc_array((merged(mdp, policy), where.indices, where.indptr), shape=(size, size)).tocsr()


def always_ends(mdp: TabularMDP, policy: Float[ndarray, "state action"]) -> bool:
    """Whether the policy can reach a terminal state from everywhere."""
    edges = next_state_table(mdp, policy)
    edges.eliminate_zeros()
    return bool(reachable(edges.T.tocsr(), mdp.terminal).all())


def factorised(mdp: TabularMDP, policy: Float[ndarray, "state action"], discount: float) -> SuperLU:
    """Factors of I - γ P_π.

    Raises RuntimeError where it is singular, which needs discount 1 and a policy that some states never leave.
    """
    where, size = mdp.pattern, mdp.num_states
    entries = merged(mdp, policy)
    entries *= -discount
    entries[where.diagonal] += 1
    return factors(csc_array((entries, where.indices, where.indptr), shape=(size, size)))


def factors(matrix: csc_array) -> SuperLU:
    """LU factors of an M-matrix."""
    return splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
