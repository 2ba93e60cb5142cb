"""A fully known finite decision process, as a sparse table: the world that inverse RL plans in.

A transition costs 12 bytes, so 10⁵ states with four actions and four outcomes each take 21 MB where a dense table
would take 319 GB.  An episode ends on entering a terminal state, and in no other way: that state pays once, on arrival,
and has no actions.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.sparse import csr_array, sparray, spmatrix
from scipy.sparse.csgraph import breadth_first_order

from posttrain.errors import UserError
from posttrain.irl import arguments
from posttrain.irl.linear_solvers import is_wide

SUM_TOLERANCE = 1e-8
"""How far a row of probabilities may be from adding up to 1."""
SUM_REMEDY = "add what is missing, or divide rounded numbers by their sum"

Start = int | np.integer | Sequence[float] | ndarray
"""The state where every episode starts, or a probability for each state."""
Ends = int | np.integer | Iterable[int] | ndarray
"""The terminal state, the numbers of several, or a true or false for each state."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Places of the entries of any policy's states × states table, column by column, the whole diagonal included."""

    slot: Int[ndarray, " outcome"]
    """For each number stored in the table of all actions, its place in the merged one."""
    diagonal: Int[ndarray, " state"]
    """The place of each diagonal entry."""
    indices: Int[ndarray, " entry"]
    indptr: Int[ndarray, " column"]

    @staticmethod
    def of(transitions: csr_array, num_actions: int) -> "Pattern":
        """The pattern of a table with a row s · num_actions + a for each state and action."""
        num_states = transitions.shape[1]
        source = np.repeat(np.arange(num_states), np.diff(transitions.indptr[::num_actions]))
        diagonal = np.arange(num_states) * (num_states + 1)
        outcomes = transitions.indices.astype(np.int64) * num_states + source
        keys, place = np.unique(np.append(outcomes, diagonal), return_inverse=True)
        column, row = np.divmod(keys, num_states)
        return Pattern(
            slot=place[:-num_states],
            diagonal=place[-num_states:],
            indices=row.astype(np.int32),
            indptr=np.searchsorted(column, np.arange(num_states + 1)).astype(np.int32),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TabularMDP:
    """Transition probabilities, where episodes start and where they end.

    Make one by `from_sparse` or `from_dense`; `posttrain.irl.read_gymnasium` reads one off an environment.
    """

    transitions: csr_array
    """P(s'|s,a) in row s · num_actions + a and column s'; the rows of terminal states are empty."""
    num_actions: int
    start: Float[ndarray, " state"]
    """Probability that an episode starts in each state."""
    terminal: Bool[ndarray, " state"]
    rewards: Float[ndarray, "state action"]
    """The environment's own expected reward; zero where it names none.  Planning and fitting do not read it."""
    states: Int[ndarray, " state"]
    """The number that the environment gives each state: after unreachable ones are left out these have gaps."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_start(self.start)
        for bad, message in faulty_entries(self):
            arguments.check_entries(bad, message)

    @staticmethod
    def from_sparse(
        transitions: sparray | spmatrix | ndarray, *, num_actions: int, start: Start, terminal: Ends = ()
    ) -> "TabularMDP":
        """From a matrix with a row s · num_actions + a for each pair; whatever leads out of terminals is left out."""
        num_actions = arguments.checked_integer(num_actions, "num_actions", least=1)
        table = sparse_floats(transitions, "transitions", copy=True)  # what follows would reach into the caller's
        try:
            table.check_format(full_check=True)  # a column too far would be read from whatever memory holds there
        except ValueError as error:
            raise UserError(f"transitions: the sparse table is malformed: {error}") from error
        table.sum_duplicates()
        num_rows, num_states = table.shape
        if num_rows != num_states * num_actions:
            raise UserError(
                f"transitions have {num_rows} rows and {num_states} columns: {num_actions} actions need"
                f" {num_states * num_actions} rows, s · {num_actions} + a for state s and action a"
            )
        ends = terminal_mask(terminal, num_states)
        return TabularMDP(
            transitions=without_rows(table, np.repeat(ends, num_actions)),
            num_actions=num_actions,
            start=start_distribution(start, num_states),
            terminal=ends,
            rewards=np.zeros((num_states, num_actions)),
            states=np.arange(num_states),
        )

    @staticmethod
    def from_dense(probabilities: arguments.Numbers, *, layout: str, start: Start, terminal: Ends = ()) -> "TabularMDP":
        """From an array whose axes are in either usual order; with S = A the shape does not show the order."""
        orders = {"state action next": (0, 1, 2), "state next action": (0, 2, 1)}
        arguments.require_word(layout, "layout", [*orders])
        array = arguments.real_array(probabilities, "probabilities")
        table = array.transpose(orders[layout]) if array.ndim == 3 else array
        if table.ndim != 3 or table.shape[0] != table.shape[2]:
            raise UserError(f"probabilities have the shape {array.shape}, which is not ({layout}): check the layout")
        num_states, num_actions, _ = table.shape
        flat = csr_array(table.reshape(num_states * num_actions, num_states))
        return TabularMDP.from_sparse(flat, num_actions=num_actions, start=start, terminal=terminal)

    @property
    def num_states(self) -> int:
        return len(self.start)

    @cached_property
    def backward(self) -> csr_array:
        """Transposed transitions: column s · num_actions + a holds P(·|s,a)."""
        return self.transitions.T.tocsr()

    @cached_property
    def pattern(self) -> Pattern:
        return Pattern.of(self.transitions, self.num_actions)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """Our index of each of the environment's state numbers."""
        return {int(state): index for index, state in enumerate(self.states)}

    @cached_property
    def wide(self) -> bool:
        """Whether to solve policies' linear systems by iteration, because factors would fill in."""
        return is_wide(state_graph(self))

    def never_ending(self) -> Int[ndarray, " state"]:
        """States from which no choice of actions ever reaches a terminal state."""
        edges = state_graph(self)
        towards = csr_array((np.ones_like(edges.data), edges.indices, edges.indptr), shape=edges.shape).T.tocsr()
        return np.flatnonzero(~reachable(towards, self.terminal))


def state_graph(mdp: TabularMDP) -> csr_array:
    """Which states can follow which, by any action: the same arrays, read with one row per state."""
    table = mdp.transitions
    return csr_array(
        (table.data, table.indices, table.indptr[:: mdp.num_actions]), shape=(mdp.num_states, mdp.num_states)
    )


def reachable(edges: csr_array, sources: Bool[ndarray, " state"]) -> Bool[ndarray, " state"]:
    """The states that a path leads to from any of the sources, the sources among them."""
    num_states = len(sources)
    first = np.flatnonzero(sources)
    # One more node that points at all sources, so that one search finds everything.
    indptr = np.append(edges.indptr, edges.indptr[-1] + len(first))
    indices = np.append(edges.indices, first)
    rooted = csr_array((np.ones(len(indices)), indices, indptr), shape=(num_states + 1, num_states + 1))
    order = breadth_first_order(rooted, num_states, directed=True, return_predecessors=False)
    found = np.zeros(num_states + 1, dtype=bool)
    found[order] = True
    states: ndarray = found[:num_states]
    return states


def sums_at(
    places: Int[ndarray, " entry"], weights: Float[ndarray, " entry"], num_places: int
) -> Float[ndarray, " place"]:
    sums = np.bincount(places, weights, minlength=num_places)
    return sums.astype(np.float64, copy=False)  # numpy makes integers where there are no weights


def without_rows(table: csr_array, dropped: Bool[ndarray, " row"]) -> csr_array:
    """The same table with those rows empty, and without stored zeros."""
    if dropped.any():
        table.data[np.repeat(dropped, np.diff(table.indptr))] = 0
    table.eliminate_zeros()
    return table


def terminal_mask(terminal: Ends, num_states: int) -> Bool[ndarray, " state"]:
    """A flag per state, from such flags or from the numbers of the terminal states; rejects what could be either."""
    arguments.check_unmasked(terminal, "terminal")
    several = isinstance(terminal, Iterable) and not isinstance(terminal, ndarray | str | bytes)
    listed: object = list(terminal) if several else terminal  # type: ignore[arg-type]
    try:
        given = np.array(listed)
    except arguments.NOT_AN_ARRAY:  # which real_array refuses
        given = np.zeros(0)
    if given.dtype == bool:
        if given.size != num_states:
            raise UserError(f"terminal has {given.size} flags: give one for each of {num_states} states, or numbers")
        return given.ravel()
    given = arguments.real_array(listed, "terminal")
    if given.ndim > 1:
        raise UserError(f"terminal has the shape {given.shape}: give the numbers of states in one list, or a flag each")
    states = arguments.state_numbers(given, "terminal", num_states)
    if states.size == num_states and np.isin(states, (0, 1)).all() and given.ndim:
        raise UserError(
            f"terminal has a 0 or a 1 for each of {num_states} states, which may be flags or the numbers of states: for"
            " flags give bools (dtype=bool), for numbers leave out repetitions"
        )
    mask = np.zeros(num_states, dtype=bool)
    mask[states] = True
    return mask


def start_distribution(start: Start, num_states: int) -> Float[ndarray, " state"]:
    """A probability per state, from such an array or from the one state where every episode starts."""
    if isinstance(start, bool | np.bool_):
        raise UserError(f"start = {start}: give the number of a state, or a probability for each of {num_states}")
    if isinstance(start, int | np.integer):
        certain = np.zeros(num_states)
        certain[arguments.state_numbers(start, "start", num_states)] = 1
        return certain
    given = arguments.real_array(start, "start").copy()
    if given.shape != (num_states,):
        raise UserError(f"start has the shape {given.shape}: give one probability for each of {num_states} states")
    return given


def sparse_floats(table: object, what: str, *, copy: bool = False) -> csr_array:
    if not isinstance(table, sparray | spmatrix):
        table = arguments.real_array(table, what)
    if table.ndim != 2 or table.dtype.kind not in "biuf":
        raise UserError(f"{what} have the shape {table.shape} and hold {table.dtype}: give a matrix of numbers")
    return csr_array(table, dtype=np.float64, copy=copy)


def check_fields(mdp: TabularMDP) -> None:
    """Refuse fields that do not fit together, as those of a world made by hand may."""
    remedy = "make worlds by from_sparse or from_dense"
    if not isinstance(mdp.transitions, csr_array) or mdp.transitions.dtype != np.float64:
        raise UserError(f"transitions is {arguments.brief_repr(mdp.transitions)}, not a csr_array of floats: {remedy}")
    num_rows, num_states = mdp.transitions.shape
    num_actions = arguments.checked_integer(mdp.num_actions, "num_actions", least=1)
    if num_rows != num_states * num_actions:
        raise UserError(f"transitions have {num_rows} rows for {num_states} states and {num_actions} actions: {remedy}")
    shapes = {"start": "f", "terminal": "b", "rewards": "f", "states": "iu"}
    for name, kinds in shapes.items():
        array, shape = getattr(mdp, name), (num_states, num_actions) if name == "rewards" else (num_states,)
        if not isinstance(array, ndarray) or array.shape != shape or array.dtype.kind not in kinds:
            raise UserError(f"{name} is {arguments.brief_repr(array)}, not of its type and the shape {shape}: {remedy}")
        arguments.check_unmasked(array, name)
    if not np.isfinite(mdp.rewards).all():
        raise UserError(f"rewards: that of state and action {np.argwhere(~np.isfinite(mdp.rewards))[0]} is not finite")


def check_start(start: Float[ndarray, " state"]) -> None:
    bad = ~(start >= 0) | ~np.isfinite(start)
    arguments.check_entries(bad, lambda i: f"start: state {i} has probability {start[i]}; use numbers from 0 to 1")
    if abs(start.sum() - 1) > SUM_TOLERANCE:
        raise UserError(f"start: the probabilities add up to {start.sum():.9g}, not to 1; {SUM_REMEDY}")


def faulty_entries(mdp: TabularMDP) -> Iterator[arguments.Fault]:
    """Rows of the table that are not distributions, and ends that no path from the start enters."""
    table = mdp.transitions
    rows, sums = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr)), table @ np.ones(mdp.num_states)

    def name(row: int | np.integer) -> str:
        return f"transitions of state {mdp.states[row // mdp.num_actions]}, action {row % mdp.num_actions} (row {row})"

    bad = ~(table.data >= 0) | ~np.isfinite(table.data)
    use = "use numbers from 0 to 1"
    yield bad, lambda i: f"{name(rows[i])} to state {mdp.states[table.indices[i]]}: probability {table.data[i]}; {use}"
    wrong = (np.abs(sums - 1) > SUM_TOLERANCE) & ~np.repeat(mdp.terminal, mdp.num_actions)
    yield wrong, lambda i: f"{name(i)}: the probabilities add up to {sums[i]:.9g}, not to 1; {SUM_REMEDY}"
    lost = mdp.terminal & ~reachable(state_graph(mdp), mdp.start > 0)
    use = "check the transitions that should lead there, or leave it out of `terminal`"
    yield lost, lambda i: f"terminal state {mdp.states[i]} cannot be reached from the start: {use}"
