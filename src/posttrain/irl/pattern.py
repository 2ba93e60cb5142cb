"""Where the entries of a policy's transition table go: found once for each world, since no policy changes it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array


@dataclass(frozen=True, eq=False)
class Pattern:
    """The places of a states × states table, column by column, with every diagonal entry among them."""

    slot: Int[ndarray, " outcome"]
    """For each number stored in the table of all actions, its place in the merged one."""
    diagonal: Int[ndarray, " state"]
    """The place of each state's own entry."""
    indices: Int[ndarray, " entry"]
    indptr: Int[ndarray, " column"]

    @staticmethod
    def of(transitions: csr_array, num_actions: int) -> "Pattern":
        """The pattern of a table with a row s · num_actions + a for each state and action."""
        num_states = transitions.shape[1]
        source = np.repeat(np.arange(num_states), np.diff(transitions.indptr[::num_actions]))
        own = np.arange(num_states) * (num_states + 1)
        outcomes = transitions.indices.astype(np.int64) * num_states + source
        keys, place = np.unique(np.append(outcomes, own), return_inverse=True)
        column, row = np.divmod(keys, num_states)
        return Pattern(
            slot=place[:-num_states],
            diagonal=place[-num_states:],
            indices=row.astype(np.int32),
            indptr=np.searchsorted(column, np.arange(num_states + 1)).astype(np.int32),
        )


def sums_at(
    places: Int[ndarray, " entry"], weights: Float[ndarray, " entry"], num_places: int
) -> Float[ndarray, " place"]:
    """The sum of the weights at each place."""
    sums = np.bincount(places, weights, minlength=num_places)
    return sums.astype(np.float64, copy=False)  # of no weights at all numpy makes integers
