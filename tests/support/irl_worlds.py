"""Small worlds and the course's set-up, for the tests of inverse RL."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from numpy import ndarray
from scipy.sparse import csr_array

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.course import expert_policy
from posttrain.irl.demonstrations import Demonstrations, Episode
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import Features, LinearReward
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


PER_STATE = LinearReward(features=np.eye(25))


def fit_course(fitter: Any, reward: LinearReward = PER_STATE, shown: Demonstrations | None = None, **given: Any) -> Any:
    """A fit of those demonstrations, or of others; one weight per state unless the reward says otherwise."""
    return fitter.fit(course_world(), reward, shown or course_demonstrations(), **given)


def course_fit(discount: float, **given: Any) -> Fit:
    """One weight per state, from those demonstrations."""
    return fit_course(MaxCausalEntIRL(discount=discount, **given))


def of_table(table: ndarray, *, start: Any = 0, ends: Any = ()) -> TabularMDP:
    """A world from P(s'|s,a) with axes state, action, next."""
    return TabularMDP.from_dense(table, layout="state action next", start=start, terminal=ends)


def features_of(mdp: TabularMDP, rng: np.random.Generator, place: str = "state") -> LinearReward:
    """Three features, the first of which is 1 in every step, so that a step can have a cost."""
    rows = mdp.num_states * (mdp.num_actions if place == "state_action" else 1)
    return LinearReward(features=np.column_stack([np.ones(rows), rng.normal(size=(rows, 2))]), on=place)


def uniform_policy(mdp: TabularMDP) -> ndarray:
    return np.full((mdp.num_states, mdp.num_actions), 1 / mdp.num_actions)


def aimless(mdp: TabularMDP, num_episodes: int, rng: Any = 0, **given: Any) -> Demonstrations:
    """Walks of the uniform policy."""
    return sample_demonstrations(mdp, uniform_policy(mdp), num_episodes=num_episodes, rng=rng, **given)


def preferred(
    episodes: Sequence[Episode], features: Features, truth: ndarray, discount: float, rng: np.random.Generator
) -> tuple[Demonstrations, Demonstrations]:
    """Episodes in pairs from one start, of which the one of more worth wins as often as Bradley and Terry say."""
    worth = features.per_episode(Demonstrations.from_episodes(episodes), discount) @ truth
    starts = [int(episode.states[0]) for episode in episodes]
    order = sorted(rng.permutation(len(episodes)), key=starts.__getitem__)
    pairs = [(one, two) for one, two in zip(order[::2], order[1::2], strict=False) if starts[one] == starts[two]]
    won = [(one, two) if rng.random() < 1 / (1 + np.exp(worth[two] - worth[one])) else (two, one) for one, two in pairs]
    wins, others = (Demonstrations.from_episodes(episodes[index] for index in side) for side in zip(*won, strict=True))
    return wins, others


def moments_of(
    fitter: MaxCausalEntIRL, mdp: TabularMDP, reward: LinearReward, weights: ndarray
) -> tuple[ndarray, ndarray]:
    """Exact features of the soft-optimal policy of some weights, and that policy."""
    setting = fitter.setting(reward.bound(mdp), mdp.start)
    plan = setting.plan(weights)
    return setting.totals(plan, plan.visits(setting.sources())), plan.policy


def refitted(
    fitter: MaxCausalEntIRL, mdp: TabularMDP, reward: LinearReward, weights: ndarray, *, within: float = 1e-6
) -> tuple[ndarray, Fit]:
    """The policy of some weights, and a fit of its exact moments, which must match them."""
    moments, policy = moments_of(fitter, mdp, reward, weights)
    fit = fitter.fit_moments(mdp, reward, moments)
    assert fit.converged
    assert fit.gap + fit.gap_error <= within
    return policy, fit


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


def assert_derivatives(objective: Any, weights: ndarray) -> None:
    """Gradient and Hessian are central differences, to 10⁻⁶ of the largest entry."""
    point = objective.at(weights)
    gradient = slopes(lambda w: np.array(objective.at(w).value), weights)
    np.testing.assert_allclose(point.gradient, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())
    hessian = slopes(lambda w: objective.at(w).gradient, weights)
    np.testing.assert_allclose(point.hessian, hessian, rtol=0, atol=1e-6 * np.abs(hessian).max())
