"""Reading the transition table of a gymnasium environment.

`P[s][a]` lists what may follow: (probability, next state, reward, whether the episode ends).  There, the end is a flag
of the transition; here, it is a property of the state.  A table in which one state ends some episodes and not others is
rejected.  States that cannot be reached from the start are left out (Taxi: 96 of 500).  Reads the tables of gymnasium
0.29 and 1.x.  Changes by wrappers are not in the table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.errors import UserError
from posttrain.irl.arguments import real_array
from posttrain.irl.mdp import TabularMDP, check_start

Outcome = tuple[float, int, float, bool]


@dataclass
class TableContents:
    """The lines read from a table, and the pair by which each state was first entered."""

    lines: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """State, action, next state, probability, reward."""
    num_actions: int = 0
    going_on: dict[int, str] = field(default_factory=dict)
    ending: dict[int, str] = field(default_factory=dict)


def read_gymnasium(env: object) -> TabularMDP:
    """The world of an environment such as FrozenLake, CliffWalking or Taxi, from its transition table `P`.

    Only the states that can be reached from the start, in the environment's order.  Time limits are wrappers and not in
    the table.  Raises UserError, naming state and action, without a table or where it cannot be read as a world.
    """
    bare = getattr(env, "unwrapped", env)
    table, start = getattr(bare, "P", None), getattr(bare, "initial_state_distrib", None)
    name = type(bare).__name__
    if not isinstance(table, Mapping | Sequence) or start is None:
        raise UserError(
            f"{name} has no transition table (`P` and `initial_state_distrib`), so it cannot be planned in exactly; use"
            " an environment such as FrozenLake, CliffWalking or Taxi"
        )
    if getattr(bare, "fickle_passenger", False):
        raise UserError(f"{name} has a fickle passenger, who is not in the table `P`: make it fickle_passenger=False")
    start = real_array(start, f"{name}: `initial_state_distrib`")
    if start.ndim != 1:
        raise UserError(f"{name}: `initial_state_distrib` has the shape {start.shape}; give a probability per state")
    check_start(start)
    contents = read_reachable(as_mapping(table), start)
    for state in sorted(contents.ending.keys() & contents.going_on.keys()):
        raise UserError(
            f"{name}: state {state} ends the episode when entered {contents.ending[state]}, and does not when entered"
            f" {contents.going_on[state]}. Give the environment one state for each way to end"
        )
    return mdp_of_table(contents, start)


def read_reachable(table: Mapping[int, object], start: Float[ndarray, " state"]) -> TableContents:
    """Follow every outcome of positive probability from the start, and never on from one that ends the episode."""
    waiting = [int(state) for state in np.flatnonzero(start)]
    contents = TableContents(going_on=dict.fromkeys(waiting, "at the start"))
    while waiting:
        state = waiting.pop()
        for action, outcomes in read_actions(table, state, contents).items():
            for probability, following, reward, ends in read_outcomes(outcomes, f"P[{state}][{action}]", len(start)):
                contents.lines.append((state, action, following, probability, reward))
                entered = contents.ending if ends else contents.going_on
                if following not in entered:
                    entered[following] = f"from state {state} by action {action}"
                    if not ends:
                        waiting.append(following)
    return contents


def read_actions(table: Mapping[int, object], state: int, contents: TableContents) -> Mapping[int, object]:
    """The outcomes of each action of a state; all states have as many actions as the first that is read."""
    entry = table.get(state)
    if not isinstance(entry, Mapping | Sequence) or not len(entry):
        raise UserError(f"state {state} is entered {contents.going_on[state]}, and P lists no actions there")
    actions = as_mapping(entry)
    contents.num_actions = contents.num_actions or len(actions)
    if set(actions) != set(range(contents.num_actions)):
        raise UserError(
            f"P[{state}] has the actions {', '.join(map(str, actions))}, not 0 to {contents.num_actions - 1}: give all"
            " states the same; one without effect may lead back to its state"
        )
    return actions


def read_outcomes(outcomes: object, where: str, num_states: int) -> Iterable[Outcome]:
    if not isinstance(outcomes, Sequence):
        raise UserError(f"{where} is {outcomes!r}: give a list of outcomes")
    for line in outcomes:
        try:
            probability, following, reward, ends = line
            well_formed = int(following) == following and bool(ends) == ends
            outcome = float(probability), int(following), float(reward), bool(ends)
        except (TypeError, ValueError):
            well_formed = False
        if not well_formed:
            raise UserError(f"{where} lists {line!r}: give (probability, next state, reward, whether the episode ends)")
        if not 0 <= probability <= 1:
            raise UserError(f"{where} leads to state {following} with probability {probability}; use 0 to 1")
        if probability == 0:
            continue
        if not 0 <= following < num_states:
            raise UserError(f"{where} leads to state {following}; states are 0 to {num_states - 1}")
        if not np.isfinite(reward):
            raise UserError(f"{where} pays {reward} on leading to state {following}; use finite numbers")
        yield outcome


def as_mapping(entries: Mapping[int, object] | Sequence[object]) -> Mapping[int, object]:
    return entries if isinstance(entries, Mapping) else dict(enumerate(entries))


def mdp_of_table(contents: TableContents, start: Float[ndarray, " state"]) -> TabularMDP:
    """The world of a table's lines, rewards averaged over what may follow."""
    num_actions = contents.num_actions
    states = np.array(sorted(contents.going_on.keys() | contents.ending.keys()), dtype=np.int64)
    lines = np.array(contents.lines).reshape(-1, 5)
    source, following = np.searchsorted(states, lines[:, 0]), np.searchsorted(states, lines[:, 2])
    rows = source * num_actions + lines[:, 1].astype(np.int64)
    shape = (len(states) * num_actions, len(states))
    return TabularMDP(
        transitions=csr_array((lines[:, 3], (rows, following)), shape=shape),
        num_actions=num_actions,
        start=start[states],
        terminal=np.isin(states, list(contents.ending)),
        rewards=np.bincount(rows, lines[:, 3] * lines[:, 4], minlength=shape[0]).reshape(-1, num_actions),
        states=states,
    )
