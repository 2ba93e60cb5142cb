"""Small worlds and the course's set-up, for the tests of inverse RL."""

from functools import cache
from typing import Any

import gymnasium
import numpy as np
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.course import expert_policy
from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.fitting import Fit
from posttrain.irl.grids import IcyGridWorld
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.planning import value_iteration

GOAL, SIDE_PRIZE = 24, 8


def newest(name: str) -> str:
    """The id of an environment in whichever gymnasium is installed: 0.29 has CliffWalking-v0 and Taxi-v3."""
    return max(known for known in gymnasium.registry if known.startswith(f"{name}-v"))


def random_world(
    rng: np.random.Generator, *, num_states: int = 6, num_actions: int = 3, num_ends: int = 1
) -> TabularMDP:
    """Every action leads anywhere with some chance; the last states end an episode; it starts in two of the others."""
    table = rng.dirichlet(np.full(num_states, 0.5), (num_states, num_actions)) * 0.9 + 0.1 / num_states
    start = np.zeros(num_states)
    start[:2] = rng.dirichlet([1, 1])
    ends = range(num_states - num_ends, num_states)
    return TabularMDP.from_dense(table, layout="state action next", start=start, terminal=ends)


def chain(length: int, *, ends: bool) -> TabularMDP:
    """One action, which leads from each state to the next; the last state ends the episode, or stays where it is."""
    following = [*range(1, length), length - 1]
    steps = csr_array((np.ones(length), (range(length), following)), shape=(length, length))
    return TabularMDP.from_sparse(steps, num_actions=1, start=0, terminal=[length - 1] if ends else [])


class Zeros(np.random.Generator):
    """The least that numpy draws, which it does once in 2⁵³ times."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64())

    def random(self) -> float:
        return 0.0


def course_rewards() -> ndarray:
    rewards = np.zeros(25)
    rewards[GOAL], rewards[SIDE_PRIZE] = 1.0, 0.65
    return rewards


def endless_grid() -> IcyGridWorld:
    """The course's world, which goes on after its goal: its value iteration and its partition need what follows."""
    return IcyGridWorld(5, slip=0.2, terminal=())


def course_world() -> IcyGridWorld:
    """The same, as demonstrations walk it: the goal ends an episode."""
    return IcyGridWorld(5, slip=0.2, terminal=[GOAL])


def course_expert() -> ndarray:
    world = endless_grid()
    values = value_iteration(world, course_rewards(), discount=0.9, tolerance=1e-4)
    return expert_policy(world.intended, values)


@cache
def course_demonstrations() -> Demonstrations:
    """200 episodes of the expert from state 0 to the goal."""
    return sample_demonstrations(course_world(), course_expert(), num_episodes=200, rng=np.random.default_rng(11))


def course_fit(discount: float, **given: Any) -> Fit:
    """One weight per state, from those demonstrations."""
    reward = LinearReward(features=np.eye(25))
    return MaxCausalEntIRL(discount=discount, **given).fit(course_world(), reward, course_demonstrations())


def dense_transitions(mdp: TabularMDP) -> ndarray:
    """P(s'|s,a) with axes state, action, next."""
    return mdp.transitions.toarray().reshape(mdp.num_states, mdp.num_actions, mdp.num_states)


def slopes(function, at: ndarray, *, step: float = 1e-5) -> ndarray:
    """Central differences of a function of a vector, a row for each entry."""
    rows = []
    for index in range(len(at)):
        nudge = np.zeros(len(at))
        nudge[index] = step
        rows.append((function(at + nudge) - function(at - nudge)) / (2 * step))
    return np.array(rows)
