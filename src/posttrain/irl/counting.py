"""Demonstrations checked against a world, and counted."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.irl.arguments import Fault, check_entries, checked_integer, require_kind
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.mdp import TabularMDP, sums_at

UNSEEN = 0.01
"""Share of the discounted weight of an episode that truncation may hide without a warning."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Discounted visits, averaged over episodes: what features are summed with."""

    acting: Float[ndarray, "state action"]
    """How often each action was taken in each state."""
    ending: Float[ndarray, " state"]
    """How often an episode ended in each terminal state."""
    entered: Float[ndarray, " state"]
    """How often a step led to each state, with the discount of the step."""


def start_shares(demonstrations: Demonstrations, num_states: int) -> Float[ndarray, " state"]:
    check_states(demonstrations, num_states)
    starts = demonstrations.states[demonstrations.first_visits]
    return np.bincount(starts, minlength=num_states) / len(demonstrations)


def visit_totals(demonstrations: Demonstrations, num_states: int) -> Float[ndarray, " state"]:
    """Visits of each state, undiscounted, the last state of every episode among them, averaged over episodes."""
    check_states(demonstrations, num_states)
    return np.bincount(demonstrations.states, minlength=num_states) / len(demonstrations)


def discounted_counts(demonstrations: Demonstrations, mdp: TabularMDP, *, discount: float) -> Counts:
    """Visits as planning counts them: at each action, and at the end in a terminal state.

    The last state of a truncated episode is not counted, since nothing was done there.
    """
    visits, acting = demonstrations, demonstrations.acting
    weights = discount ** visits.visit_times.astype(np.float64) / len(visits)
    pairs = visits.states[acting] * mdp.num_actions + visits.actions
    ending = np.where(mdp.terminal[visits.states[~acting]], weights[~acting], 0.0)
    return Counts(
        acting=sums_at(pairs, weights[acting], mdp.num_states * mdp.num_actions).reshape(-1, mdp.num_actions),
        ending=sums_at(visits.states[~acting], ending, mdp.num_states),
        entered=sums_at(visits.states[visits.visit_times > 0], weights[acting], mdp.num_states),
    )


def action_counts(
    demonstrations: Demonstrations, mdp: TabularMDP, *, horizon: int
) -> Float[ndarray, "horizon state action"]:
    """How often each action was taken in each state at each time, averaged over episodes."""
    visits, acting = demonstrations, demonstrations.acting
    pairs = visits.states[acting] * mdp.num_actions + visits.actions
    size = mdp.num_states * mdp.num_actions
    flat = np.bincount(visits.visit_times[acting] * size + pairs, minlength=horizon * size)
    return flat.reshape(horizon, mdp.num_states, mdp.num_actions) / len(visits)


def in_world(demonstrations: Demonstrations, mdp: TabularMDP) -> Demonstrations:
    """The same episodes with states as our indices, all possible in the world.

    Raises UserError naming the episode and the step: a state or action that does not exist, a transition of
    probability zero, an action after the end, an end where the world does not end.
    """
    visited = require_kind(demonstrations, Demonstrations, "demonstrations").states
    numbers = require_kind(mdp, TabularMDP, "mdp").states
    place = np.searchsorted(numbers, visited).clip(max=len(numbers) - 1)
    known = f"{len(numbers)} from {numbers[0]} to {numbers[-1]}"
    check_entries(
        numbers[place] != visited,
        lambda i: (
            f"{demonstrations.step_name(i)}: there is no state {visited[i]} among those that can be reached ({known})"
        ),
    )
    placed = replace(demonstrations, states=place)
    for bad, message in impossible_entries(placed, mdp):
        check_entries(bad, message)
    return placed


def impossible_entries(known: Demonstrations, mdp: TabularMDP) -> Iterator[Fault]:
    """Steps that the world does not have, and ends in states that are not terminal."""
    acting, actions = np.flatnonzero(known.acting), known.actions
    source, following = known.states[acting], known.states[known.visit_times > 0]
    last = known.states[known.first_visits + known.lengths]

    def step(number: int) -> str:
        return f"{known.step_name(acting[number])}: action {actions[number]} in state {mdp.states[source[number]]}"

    yield (actions < 0) | (actions >= mdp.num_actions), lambda i: f"{step(i)}: actions are 0 to {mdp.num_actions - 1}"
    yield mdp.terminal[source], lambda i: f"{step(i)}, which is terminal: end the episode there"
    rows = source * mdp.num_actions + actions
    chances = np.asarray(mdp.transitions[rows, following]).ravel() if len(rows) else np.ones(0)
    yield chances == 0, lambda i: f"{step(i)} never leads to state {mdp.states[following[i]]}"
    yield (
        known.terminated & ~mdp.terminal[last],
        lambda i: (
            f"demonstration {i} is marked as terminated in state {mdp.states[last[i]]}, which is not terminal:"
            " mark it as truncated (from_imitation: time_limit), or name the state in `terminal`"
        ),
    )
    yield (
        (known.lengths == 0) & ~mdp.terminal[last],
        lambda i: f"demonstration {i} has no actions and its state {mdp.states[last[i]]} is not terminal: leave it out",
    )


def check_states(demonstrations: Demonstrations, num_states: int) -> None:
    states = require_kind(demonstrations, Demonstrations, "demonstrations").states
    checked_integer(num_states, "num_states", least=1)
    bad, named = (states < 0) | (states >= num_states), demonstrations.step_name
    known = f"states are 0 to {num_states - 1}"
    check_entries(bad, lambda i: f"{named(i)}: there is no state {states[i]}; {known}")


def check_horizon(known: Demonstrations, horizon: int | None, what: str = "demonstration") -> None:
    if horizon is not None:
        long = known.lengths > horizon
        check_entries(long, lambda i: f"{what} {i} has {known.lengths[i]} actions; the horizon is {horizon}")


def check_whole(known: Demonstrations, mdp: TabularMDP, *, discount: float, horizon: int | None) -> None:
    """Reject totals of episodes that were cut off: a policy's totals are over whole episodes.

    At a discount below 1, the part after a cut is worth γ^T of an episode; a warning says so if that is noticeable.
    """
    last = known.states[known.first_visits + known.lengths]
    cut = ~mdp.terminal[last]
    check_horizon(known, horizon)
    if horizon is not None:
        cut &= known.lengths < horizon
    elif discount < 1:
        unseen = float((discount ** known.lengths[cut].astype(np.float64)).sum() / len(known))
        if unseen > UNSEEN:
            warnings.warn(
                f"{int(cut.sum())} of {len(known)} demonstrations are truncated: at discount {discount} what they do "
                f"not show has {unseen:.0%} of the weight of an endless episode. Use longer episodes, or maximum"
                " causal entropy with objective = likelihood",
                stacklevel=3,
            )
        return
    until = "a terminal state" if horizon is None else f"a terminal state or the horizon of {horizon}"
    check_entries(
        cut,
        lambda i: (
            f"demonstration {i} was truncated in state {mdp.states[last[i]]} after {known.lengths[i]} actions: at"
            f" discount {discount} its totals need {until}. Use objective = likelihood, or leave it out"
        ),
    )
