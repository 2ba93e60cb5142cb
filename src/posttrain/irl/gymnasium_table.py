"""Reading the transition table of a gymnasium environment.

`P[s][a]` lists what may follow: (probability, next state, reward, whether the episode ends).  The end is a flag of the
transition there and a property of the state here, so a table is refused in which the same state ends one episode and
not another.  States that cannot be reached from the start are left out (Taxi: 96 of 500).  Works on the tables of
gymnasium 0.29 and 1.x alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError

Outcome = tuple[float, int, float, bool]
Table = Mapping[int, Mapping[int, Sequence[Outcome]]]


@dataclass
class Reading:
    """What has been read of a table so far: one line per outcome, and by which pair each state was first entered."""

    lines: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """State, action, next state, probability, reward."""
    going_on: dict[int, str] = field(default_factory=dict)
    ending: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class TableFields:
    """What a `TabularMDP` is made of."""

    transitions: csr_array
    num_actions: int
    start: ndarray
    terminal: ndarray
    rewards: ndarray
    states: ndarray


def read_table(env: object) -> TableFields:
    """The reachable part of the table; states are numbered anew, in the environment's order."""
    bare = getattr(env, "unwrapped", env)
    table: Table | None = getattr(bare, "P", None)
    start = getattr(bare, "initial_state_distrib", None)
    name = type(bare).__name__
    if table is None or start is None:
        raise UserError(
            f"{name} has no transition table (`P` and `initial_state_distrib`), so it cannot be planned in exactly; "
            "environments such as FrozenLake, CliffWalking and Taxi have one"
        )
    if getattr(bare, "fickle_passenger", False):
        raise UserError(
            f"{name} has a fickle passenger, who changes the destination outside the table `P`: "
            "make it with fickle_passenger=False"
        )
    start = np.asarray(start, dtype=np.float64)
    reading = read_reachable(table, start)
    clash = sorted(reading.ending.keys() & reading.going_on.keys())
    if clash:
        state = clash[0]
        raise UserError(
            f"{name}: state {state} ends the episode when entered {reading.ending[state]}, and does not when entered "
            f"{reading.going_on[state]}. Here an end is a property of the state entered, so this table cannot be read: "
            "give the environment a state of its own for each way to end"
        )
    return renumbered(reading, start, num_actions=len(table[next(iter(reading.going_on))]))


def read_reachable(table: Table, start: ndarray) -> Reading:
    """Follow every outcome of positive probability from the start, and never on from one that ends the episode."""
    reading = Reading(going_on={int(state): "at the start" for state in np.flatnonzero(start)})
    waiting = list(reading.going_on)
    while waiting:
        state = waiting.pop()
        for action, outcomes in table[state].items():
            for probability, following, reward, ends in outcomes:
                if probability == 0:
                    continue
                reading.lines.append((state, action, int(following), float(probability), float(reward)))
                entered = reading.ending if ends else reading.going_on
                if int(following) not in entered:
                    entered[int(following)] = f"from state {state} by action {action}"
                    if not ends:
                        waiting.append(int(following))
    return reading


def renumbered(reading: Reading, start: ndarray, num_actions: int) -> TableFields:
    """The lines as a table."""
    states = np.array(sorted(reading.going_on.keys() | reading.ending.keys()), dtype=np.int64)
    lines = np.array(reading.lines)
    source, following = np.searchsorted(states, lines[:, 0]), np.searchsorted(states, lines[:, 2])
    rows = source * num_actions + lines[:, 1].astype(np.int64)
    shape = (len(states) * num_actions, len(states))
    transitions = csr_array((lines[:, 3], (rows, following)), shape=shape)
    return TableFields(
        transitions=transitions,
        num_actions=num_actions,
        start=start[states],
        terminal=np.isin(states, list(reading.ending)),
        rewards=np.bincount(rows, lines[:, 3] * lines[:, 4], minlength=shape[0]).reshape(-1, num_actions),
        states=states,
    )
