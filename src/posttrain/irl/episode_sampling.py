"""Makes demonstrations: walks through a world with a policy and a fixed seed."""

from functools import cache

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from numpy.random import Generator

from posttrain.irl.arguments import Numbers, checked_integer, random_generator
from posttrain.irl.comparison import policy_array
from posttrain.irl.demonstrations import Demonstrations, Episode
from posttrain.irl.mdp import TabularMDP


def sample_demonstrations(
    mdp: TabularMDP, policy: Numbers, *, num_episodes: int, rng: Generator | int, max_steps: int = 10_000
) -> Demonstrations:
    """Episodes of a policy, each until a terminal state or, truncated, until `max_steps` actions.

    Each draw takes one uniform number, as numpy's `rng.choice(n, p=p)` does: the start, unless there is only one, then
    by turns an action and the state that it leads to.  States are the environment's numbers.  `rng` may be a seed.
    """
    num_episodes = checked_integer(num_episodes, "num_episodes", least=1)
    max_steps = checked_integer(max_steps, "max_steps", least=1)
    choices, table, draws = cumulative(policy_array(mdp, policy)), mdp.transitions, random_generator(rng)
    starts, only = cumulative(mdp.start), np.flatnonzero(mdp.start)

    @cache  # few rows of a large world are visited
    def outcomes(row: int) -> Float[ndarray, " outcome"]:
        return cumulative(table.data[table.indptr[row] : table.indptr[row + 1]])

    def episode() -> Episode:
        state = int(starts.searchsorted(draws.random(), side="right") if len(only) > 1 else only[0])
        states: list[int] = []
        actions: list[int] = []
        while not mdp.terminal[state] and len(actions) < max_steps:
            action = int(choices[state].searchsorted(draws.random(), side="right"))
            row = state * mdp.num_actions + action
            states.append(state)
            actions.append(action)
            outcome = outcomes(row).searchsorted(draws.random(), side="right")
            state = int(table.indices[table.indptr[row] + outcome])
        ended = bool(mdp.terminal[state])
        return Episode(mdp.states[[*states, state]], actions, terminated=ended, truncated=not ended)

    return Demonstrations.from_episodes(episode() for _ in range(num_episodes))


def cumulative(probabilities: Float[ndarray, "*rows choice"]) -> Float[ndarray, "*rows choice"]:
    """Running totals that end at exactly 1, as numpy's `choice` makes them."""
    totals = probabilities.cumsum(axis=-1)
    return np.asarray(totals / totals[..., -1:])
