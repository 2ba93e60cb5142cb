"""What a recovered reward is worth, on a dry 2 × 2 grid at -1 a step, where everything can be worked out by hand."""

import numpy as np
import pytest

from posttrain.irl.demonstrations import Demonstrations
from posttrain.irl.grids import GridWorld
from posttrain.irl_runs.expert_episodes import ExpertEpisodes
from posttrain.irl_runs.measures import best_states, expected_visits, policy_measures, value_lost
from posttrain.irl_runs.methods import RecoveredReward
from posttrain.irl_runs.worlds import World

GRID = GridWorld(2)
COSTS = np.array([-1.0, -1.0, -1.0, 0.0])
WORLD = World(mdp=GRID, rewards=COSTS)
UNIFORM = np.full((4, 4), 0.25)
MOSTLY_RIGHT = np.full((4, 4), 0.2) + 0.2 * np.eye(4)[[0, 2, 0, 0]]  # 0 → 1 → 3 and 2 → 3 are the likeliest moves
INTO_THE_WALL = np.eye(4)[[1, 1, 1, 1]]
BEST = np.eye(4)[[0, 2, 0, 0]]


def expert(policy: np.ndarray | None = None, *, reward: np.ndarray | None = COSTS) -> ExpertEpisodes:
    """One episode, 0 → 1 → 3."""
    episodes = Demonstrations.from_transitions([[(0, 0, 1), (1, 2, 3)]])
    return ExpertEpisodes(episodes=episodes, reward=reward, policy=policy, discount=1.0)


def recovered(policy: np.ndarray, *, reward: np.ndarray = COSTS) -> RecoveredReward:
    none = np.zeros(4)
    moments = np.array([1.0, 1, 0, 1])
    return RecoveredReward(
        weights=none, reward=reward, policy=policy, expected=none, moments=moments, converged=True, curve=({},)
    )


def test_measures_of_wandering_at_random() -> None:
    """Visits D(0) = 1 + D(0)/2 + D(1)/2 and D(1) = D(0)/4 + D(1)/2: 4, 2, 2 and the end once, where (1, 1, 0, 1) was
    shown; 8 steps, of which the best way takes 2."""
    measures = policy_measures(WORLD, expert(BEST), recovered(UNIFORM))
    assert measures["gap"] == 1, "the expected features are 0 here"
    assert measures["visits_gap"] == pytest.approx(3)
    assert measures["steps_per_episode"] == pytest.approx(8)
    assert measures["value_lost"] == pytest.approx(6)
    assert measures["value_lost_by_expert"] == pytest.approx(0)
    assert measures["best_states"] == [3, 0, 1, 2]


def test_the_greedy_policy_takes_the_likeliest_actions() -> None:
    measures = policy_measures(WORLD, expert(), recovered(MOSTLY_RIGHT))
    assert measures["value_lost_greedy"] == pytest.approx(0)
    assert measures["value_lost"] > 1
    assert measures["value_lost_by_expert"] is None, "nobody is known to have acted"


def test_a_policy_of_two_steps_visits_three_states_and_has_no_value_without_horizon() -> None:
    measures = policy_measures(WORLD, expert(), recovered(np.stack([UNIFORM, UNIFORM])))
    assert measures["steps_per_episode"] == pytest.approx(2), "no end is nearer than that"
    # Once in 0, then there with 1/2, or beside it; then 3/8 in 0 and 1/4 each beside it: 15/8, 1/2, 1/2 and 1/8.
    assert measures["visits_gap"] == pytest.approx(7 / 8)
    assert measures["value_lost"] is None
    assert measures["value_lost_greedy"] is None


def test_what_cannot_be_measured_is_none() -> None:
    assert expected_visits(GRID, INTO_THE_WALL) is None
    measures = policy_measures(WORLD, expert(), recovered(INTO_THE_WALL))
    assert measures["visits_gap"] is measures["steps_per_episode"] is measures["value_lost"] is None
    assert value_lost(WORLD, expert(reward=None), UNIFORM) is None
    assert value_lost(WORLD, expert(), None) is None


def test_best_states_are_five_by_reward_and_then_by_number() -> None:
    worth = np.array([0.0, 3, 1, 1, 3, 2, -5, 2, 9.0])
    assert best_states(GridWorld(3), recovered(np.full((9, 4), 0.25), reward=worth)) == [8, 1, 4, 5, 7]
    assert best_states(GRID, recovered(UNIFORM, reward=np.zeros((4, 4)))) is None
