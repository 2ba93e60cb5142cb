"""Solves I - γ P: by factors if the world is flat, by iteration if factors would fill in.

The matrix is diagonally dominant by rows with no positive entry off the diagonal (an M-matrix), so its factors need no
pivoting.  An ordering for symmetric patterns halves the fill on grids.  Factors of a cube of 46³ states, or of 10⁴
states that lead anywhere, are nearly dense; there BiCGSTAB (van der Vorst 1992), scaled by the diagonal, takes some
hundred products with P.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy import ndarray
from scipy.sparse import csc_array, csr_array
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.sparse.linalg import LinearOperator, SuperLU, bicgstab, splu

from posttrain.errors import RunError


class Divergence(RunError):
    """No finite values exist, or double precision cannot tell them from infinite ones."""


class ConvergenceWarning(UserWarning):
    """A fit ended before its gradient fell to the tolerance.

    The fit says so too (`converged`).  To silence the warning, use
    `warnings.simplefilter("ignore", ConvergenceWarning)`.
    """


NARROW = 300
"""States that separate a world in two, up to which its factors cost less than iterations."""
SQUARE = 2.0
"""The same in units of the root of all its states, which is what separates a square."""
AIM = 1e-14
"""Residual of an iteration, as a share of the right-hand side."""
ACCURACY = 1e-12
"""Largest final residual, relative to the largest entries of the right-hand side and the solution."""
ROUNDS = 6
"""How often an iteration is started, each time from the last residual."""
MAX_ITERATIONS = 3000
LARGEST_FACTORED = 20_000
"""Most states for which a system that iteration does not solve is factorised, however wide: dense factors take 3 GB."""

Direction = Literal["N", "T"]
"""Whether a system is solved directly or transposed."""


@runtime_checkable
class Solver(Protocol):
    """A linear system to be solved for several right-hand sides."""

    def solve(self, right: ndarray, trans: Direction = "N") -> ndarray:
        """For one right-hand side, or for each column of several."""


def solver(matrix: csc_array, *, wide: bool) -> Solver:
    """The best solver of I - γ P, whose diagonal must be stored in full.

    Raises Divergence if it is singular, which needs discount 1 and a policy that never leaves some states; for a
    wide one only when it is solved.
    """
    return IterativeSolver(matrix) if wide else lu_factors(matrix)


def lu_factors(matrix: csc_array) -> SuperLU:
    try:
        return splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    except RuntimeError as singular:
        raise Divergence("the linear system of a policy is singular: from some states it never ends") from singular


@dataclass(frozen=True, eq=False)
class IterativeSolver:
    """A system that is solved by iteration, and by factors only if that does not converge."""

    matrix: csc_array

    @cached_property
    def rows(self) -> csr_array:
        return self.matrix.tocsr()

    @cached_property
    def factors(self) -> SuperLU:
        """Factors without the zeros of this policy; Divergence where they would be too large to try."""
        entries = self.matrix.tocoo()
        kept = (entries.data != 0) | (entries.row == entries.col)
        left = csc_array((entries.data[kept], (entries.row[kept], entries.col[kept])), shape=self.matrix.shape)
        if left.shape[0] > LARGEST_FACTORED and is_wide(abs(left).tocsr()):
            raise Divergence(
                f"the linear system of a policy of {left.shape[0]} states did not settle in {ROUNDS} times"
                f" {MAX_ITERATIONS} iterations, and its factors would be too large to try"
            )
        return lu_factors(left)

    def solve(self, right: ndarray, trans: Direction = "N") -> ndarray:
        """Raises Divergence if neither iterations nor factors solve it."""
        table, solution = self.rows if trans == "N" else self.matrix.T, np.empty(right.shape)
        columns, solved = right.reshape(len(right), -1), solution.reshape(len(right), -1)
        for place, column in enumerate(columns.T):
            found = bicgstab_solution(table, column)
            solved[:, place] = self.factors.solve(column, trans) if found is None else found
        return solution


def bicgstab_solution(table: csr_array, right: ndarray) -> ndarray | None:
    """The solution for one right-hand side; None if no iteration settles.

    BiCGSTAB measures the residual along the right-hand side.  For an episode that starts in one state and takes a
    certain way that residual is 0 after one step, and it breaks down.  So later rounds start from a guess whose
    residual has some of every direction.
    """
    with np.errstate(all="ignore"):  # what is not finite is not accepted below
        scale = 1 / table.diagonal()
        scaled = LinearOperator(table.shape, matvec=lambda entries: table @ (scale * entries), dtype=np.float64)
        solution: ndarray = np.zeros(len(right))
        left_over, guess = right, None
        for _ in range(ROUNDS):
            size = float(np.abs(left_over).max())  # scipy takes numbers for 0 that are small in themselves
            if size > 0:
                step, _ = bicgstab(scaled, left_over / size, x0=guess, rtol=AIM, atol=0.0, maxiter=MAX_ITERATIONS)
                nearer = solution + size * scale * step
                remainder = right - table @ nearer
                if np.abs(remainder).max() < size:
                    solution, left_over = nearer, remainder
                guess = 1e-3 * np.random.default_rng(0).random(len(right))
            if np.abs(left_over).max() <= ACCURACY * (np.abs(right).max() + np.abs(solution).max()):
                return solution
    return None


def is_wide(edges: csr_array) -> bool:
    """Whether factors of a world would cost more than iterations, by the number of states that separate it in two."""
    narrow: float = max(NARROW, SQUARE * edges.shape[0] ** 0.5)
    return edges.shape[0] > narrow and width(edges) > narrow


def width(edges: csr_array) -> int:
    """About how many states separate a world in two: the most at one distance from an end of its largest part.

    Hubs, states with so many neighbours that they shorten every distance, are counted one by one.
    """
    both = edges + edges.T
    kept = np.flatnonzero(np.diff(both.indptr) <= 16 + 10 * both.shape[0] ** 0.5)
    num_hubs = int(both.shape[0]) - len(kept)
    if not len(kept):
        return num_hubs
    both = both[kept][:, kept]
    _, part = connected_components(both, directed=False)
    far, distances = int((part == np.bincount(part).argmax()).argmax()), np.zeros(0)
    for _ in range(2):
        distances = dijkstra(both, directed=False, indices=far, unweighted=True)
        far = int(np.where(np.isfinite(distances), distances, -1).argmax())
    levels = np.bincount(distances[np.isfinite(distances)].astype(np.int64))
    return num_hubs + int(levels.max())
