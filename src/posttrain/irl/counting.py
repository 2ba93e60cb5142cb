"""What demonstrations say about a world: checked against it, and counted."""

import warnings
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.arguments import checked_integer, require_kind
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.pattern import sums_at

UNSEEN = 0.01
"""Share of the discounted weight of an episode that truncation may hide without a word."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Discounted visits, averaged over episodes: what features are summed with."""

    acting: Float[ndarray, "state action"]
    """How often each action was taken in each state."""
    ending: Float[ndarray, " state"]
    """How often an episode was ended in each terminal state."""
    entered: Float[ndarray, " state"]
    """How often a step led to each state, with the discount of the step."""


def initial_histogram(demonstrations: Demonstrations, num_states: int) -> Float[ndarray, " state"]:
    """The share of episodes that start in each state."""
    check_states(demonstrations, num_states)
    starts = demonstrations.states[demonstrations.first_visits]
    return np.bincount(starts, minlength=num_states) / len(demonstrations)


def visit_totals(demonstrations: Demonstrations, num_states: int) -> Float[ndarray, " state"]:
    """Visits of each state, undiscounted, the last state of every episode among them, averaged over episodes."""
    check_states(demonstrations, num_states)
    return np.bincount(demonstrations.states, minlength=num_states) / len(demonstrations)


def discounted_counts(demonstrations: Demonstrations, mdp: TabularMDP, *, discount: float) -> Counts:
    """Visits as planning pays for them: at each action, and at the end in a terminal state.

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
    """The same episodes with states as our indices, once each is found to be possible in the world.

    Raises UserError naming the episode and the step: a state or action that does not exist, a transition of
    probability zero, an action after the end, an end where the world does not end.
    """
    require_kind(demonstrations, Demonstrations, "demonstrations")
    numbers = require_kind(mdp, TabularMDP, "mdp").states
    place = np.searchsorted(numbers, demonstrations.states).clip(max=len(numbers) - 1)
    unknown = np.flatnonzero(numbers[place] != demonstrations.states)
    if unknown.size:
        episode, time = demonstrations.visit_of(int(unknown[0]))
        raise UserError(
            f"demonstration {episode}, step {time}: "
            f"there is no state {demonstrations.states[unknown[0]]} among those that can be reached "
            f"({len(numbers)} from {numbers[0]} to {numbers[-1]})"
        )
    known = replace(demonstrations, states=place)
    check_actions(known, mdp)
    check_ends(known, mdp)
    return known


def check_states(demonstrations: Demonstrations, num_states: int) -> None:
    """Refuse states that are not among the first `num_states`."""
    require_kind(demonstrations, Demonstrations, "demonstrations")
    checked_integer(num_states, "num_states", least=1)
    bad = np.flatnonzero((demonstrations.states < 0) | (demonstrations.states >= num_states))
    if bad.size:
        episode, time = demonstrations.visit_of(int(bad[0]))
        raise UserError(
            f"demonstration {episode}, step {time}: there is no state {demonstrations.states[bad[0]]}; "
            f"states are 0 to {num_states - 1}"
        )


def check_horizon(known: Demonstrations, horizon: int | None, what: str) -> None:
    """Refuse an episode of more actions than there are; `what` says whose number is told."""
    if horizon is not None and known.lengths.max() > horizon:
        episode = int(known.lengths.argmax())
        raise UserError(f"{what} {episode} has {known.lengths[episode]} actions; the horizon is {horizon}")


def check_actions(known: Demonstrations, mdp: TabularMDP) -> None:
    """Refuse actions and transitions that the world does not have."""
    bad = np.flatnonzero((known.actions < 0) | (known.actions >= mdp.num_actions))
    if bad.size:
        episode, time = known.step_of(int(bad[0]))
        raise UserError(
            f"demonstration {episode}, step {time}: there is no action {known.actions[bad[0]]}; "
            f"actions are 0 to {mdp.num_actions - 1}"
        )
    source = known.states[known.acting]
    following = known.states[known.visit_times > 0]
    late = np.flatnonzero(mdp.terminal[source])
    if late.size:
        episode, time = known.step_of(int(late[0]))
        raise UserError(
            f"demonstration {episode}, step {time}: an action is taken in state {mdp.states[source[late[0]]]}, "
            "which is terminal: end the episode there"
        )
    if not source.size:
        return  # every episode starts where it ends
    chances = mdp.transitions[source * mdp.num_actions + known.actions, following]
    impossible = np.flatnonzero(np.asarray(chances).ravel() == 0)
    if impossible.size:
        step = int(impossible[0])
        episode, time = known.step_of(step)
        raise UserError(
            f"demonstration {episode}, step {time}: action {known.actions[step]} in state {mdp.states[source[step]]} "
            f"never leads to state {mdp.states[following[step]]}"
            f"{f' ({impossible.size} impossible transitions in all)' if impossible.size > 1 else ''}"
        )


def check_ends(known: Demonstrations, mdp: TabularMDP) -> None:
    """Refuse an episode that is said to have terminated where the world goes on, or that is empty."""
    last = known.states[known.first_visits + known.lengths]
    wrong = np.flatnonzero(known.terminated & ~mdp.terminal[last])
    if wrong.size:
        raise UserError(
            f"demonstration {wrong[0]} is marked as terminated in state {mdp.states[last[wrong[0]]]}, which is not "
            "terminal in this world: mark it as truncated (from_imitation takes a time_limit), or name it in `terminal`"
        )
    empty = np.flatnonzero((known.lengths == 0) & ~mdp.terminal[last])
    if empty.size:
        raise UserError(
            f"demonstration {empty[0]} has no actions and its state {mdp.states[last[empty[0]]]} is not terminal: "
            "it shows nothing; leave it out"
        )


def check_whole(known: Demonstrations, mdp: TabularMDP, *, discount: float, horizon: int | None) -> None:
    """Refuse totals of episodes that were cut off: a policy's totals are of whole ones.

    At a discount below 1 what follows a cut is worth γ^T of an episode, and where that is noticeable a warning says so.
    """
    last = known.states[known.first_visits + known.lengths]
    cut = ~mdp.terminal[last]
    if horizon is not None:
        long = np.flatnonzero(known.lengths > horizon)
        if long.size:
            raise UserError(f"demonstration {long[0]} has {known.lengths[long[0]]} actions; the horizon is {horizon}")
        cut &= known.lengths < horizon
    elif discount < 1:
        unseen = float((discount ** known.lengths[cut].astype(np.float64)).sum() / len(known))
        if unseen > UNSEEN:
            warnings.warn(
                f"{int(cut.sum())} of {len(known)} demonstrations are truncated: at discount {discount} what they do "
                f"not show has {unseen:.0%} of the weight of an endless episode, and their features lack that much. "
                "Use longer episodes, or maximum causal entropy with objective = likelihood",
                stacklevel=3,
            )
        return
    if cut.any():
        episode = int(np.flatnonzero(cut)[0])
        until = "a terminal state" if horizon is None else f"a terminal state or the horizon of {horizon}"
        raise UserError(
            f"demonstration {episode} was truncated in state {mdp.states[last[episode]]} after "
            f"{known.lengths[episode]} actions: at discount {discount} its totals need {until}. "
            f"Use maximum causal entropy with objective = likelihood"
            f"{' or a discount below 1' if horizon is None else ''}, or leave it out "
            f"({int(cut.sum())} of {len(known)} are cut)"
        )
