"""Square grids, dry and icy, built without a dense table.

State y · size + x; actions 0 to 3 move +x, -x, +y, -y; a move over the edge stays.
"""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError
from posttrain.irl.arguments import SHARE, checked_integer, checked_number
from posttrain.irl.mdp import Ends, Start, TabularMDP, start_distribution, terminal_mask, without_rows

MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))
"""What each action adds to (x, y)."""


class IcyGridWorld(TabularMDP):
    """A grid on which a step may slip: into a random direction with probability `slip`, which may be the intended one.

    P(s'|s,a) = 1 - slip + slip/4 for the intended neighbour, slip/4 for each other one
    """

    size: int
    slip: float

    def __init__(self, size: int, slip: float = 0.2, *, start: Start = 0, terminal: Ends | None = None) -> None:
        """Without `terminal` the last corner ends an episode; an empty one makes a world without ends."""
        size = checked_integer(size, "size", least=1)
        checked_number(slip, "slip", SHARE)
        num_states = size * size
        ends = terminal_mask(num_states - 1 if terminal is None else terminal, num_states)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "slip", slip)
        table = icy_transitions(neighbours(size), slip)
        super().__init__(
            transitions=without_rows(table, np.repeat(ends, len(MOVES))),
            num_actions=len(MOVES),
            start=start_distribution(start, num_states),
            terminal=ends,
            rewards=np.zeros((num_states, len(MOVES))),
            states=np.arange(num_states),
        )

    @property
    def intended(self) -> Int[ndarray, "state action"]:
        """Where each action leads when nothing slips."""
        return neighbours(self.size)


class GridWorld(IcyGridWorld):
    """A grid on which every step goes where it was meant to."""

    def __init__(self, size: int, *, start: Start = 0, terminal: Ends | None = None) -> None:
        super().__init__(size, 0.0, start=start, terminal=terminal)


def neighbours(size: int) -> Int[ndarray, "state action"]:
    """The next state in the direction of each action; the state itself at the edge."""
    y, x = np.divmod(np.arange(size * size), size)
    neighbour = [np.clip(y + dy, 0, size - 1) * size + np.clip(x + dx, 0, size - 1) for dx, dy in MOVES]
    return np.stack(neighbour, axis=1)


def icy_transitions(neighbour: Int[ndarray, "state action"], slip: float) -> csr_array:
    """The rule above as a sparse table, row s · 4 + a."""
    num_states, num_moves = neighbour.shape
    chances = np.full((num_moves, num_moves), slip / num_moves) + (1 - slip) * np.eye(num_moves)
    rank = np.argsort(neighbour, axis=1, kind="stable")  # columns in order, as the format wants them
    columns = np.repeat(np.take_along_axis(neighbour, rank, axis=1)[:, None].astype(np.int32), num_moves, axis=1)
    data = chances[:, rank].transpose(1, 0, 2)  # [state action neighbour]
    indptr = np.arange(0, columns.size + 1, num_moves, dtype=np.int32)
    shape = (num_states * num_moves, num_states)
    table = csr_array((data.ravel(), columns.ravel(), indptr), shape=shape)
    table.sum_duplicates()  # along an edge two moves stay
    return table


def tiles(size: int, width: int) -> Float[ndarray, "state feature"]:
    """Features of a grid: a constant, and for each tile of width × width states whether the state lies in it."""
    size, width = checked_integer(size, "size", least=1), checked_integer(width, "width", least=1)
    if width > size:
        raise UserError(f"width = {width}: a tile of a grid of size {size} has a width from 1 to {size}")
    y, x = np.divmod(np.arange(size * size), size)
    per_side = -(-size // width)
    tile = (y // width) * per_side + x // width
    features = np.zeros((size * size, 1 + per_side * per_side))
    features[:, 0] = 1
    features[np.arange(size * size), 1 + tile] = 1
    return features
