"""A reinforcement learner that sees only the recovered reward learns what the demonstrator was after."""

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit
from numpy import ndarray

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.comparison import expected_value_difference, policy_value
from posttrain.irl.episode_sampling import sample_demonstrations
from posttrain.irl.features import LinearReward
from posttrain.irl.grids import IcyGridWorld
from posttrain.irl.gymnasium_table import read_gymnasium
from posttrain.irl.planning import Problem, action_values, greedy_policy, soft_policy_iteration, value_iteration
from posttrain.irl_runs.environment import LearnedReward, TabularEnvironment

EXPERT_REWARD = np.array([-1.0, -1, -1, -1, -4, -4, -1, -4, -1, -1, -1, -1, -4, -4, -4, 0])
"""A 4 × 4 grid with a puddle between the start and the goal, and one dry way round it."""


def q_learning(env: gymnasium.Env, *, discount: float, num_episodes: int) -> ndarray:
    """Action values by Watkins' tabular Q-learning, acting at random three times in ten, with steps that shrink."""
    rng = np.random.default_rng(1)
    values, visits = np.zeros((16, 4)), np.zeros((16, 4))
    for episode in range(num_episodes):
        state, _ = env.reset(seed=episode)
        done = False
        while not done:
            action = int(rng.integers(4)) if rng.random() < 0.3 else int(values[state].argmax())
            following, reward, terminated, truncated, _ = env.step(action)
            ahead = 0.0 if terminated else discount * values[following].max()
            visits[state, action] += 1
            values[state, action] += visits[state, action] ** -0.6 * (reward + ahead - values[state, action])
            state, done = following, terminated or truncated
    return values


def test_q_learning_on_the_recovered_reward_goes_where_the_expert_wanted() -> None:
    world = IcyGridWorld(4, slip=0.1)
    expert = soft_policy_iteration(Problem(mdp=world, reward=EXPERT_REWARD, discount=0.9, temperature=0.5))
    shown = sample_demonstrations(world, expert.policy, num_episodes=500, rng=np.random.default_rng(0))
    irl = MaxCausalEntIRL(objective="likelihood", discount=0.9, temperature=0.5)
    fit = irl.fit(world, LinearReward(features=np.eye(16)), shown)

    def lost(reward: ndarray) -> float:
        env = LearnedReward(TimeLimit(TabularEnvironment(world), 60), world, reward, discount=0.9)
        policy = greedy_policy(world, q_learning(env, discount=0.9, num_episodes=1500))
        return expected_value_difference(world, EXPERT_REWARD, policy, discount=0.9)

    assert lost(fit.reward) < 0.25
    # The control: the same numbers, dealt to other states.
    assert lost(np.random.default_rng(3).permutation(fit.reward)) > 1.0


def test_on_a_frozen_lake_of_gymnasium_q_learning_acts_as_the_expert_who_was_watched() -> None:
    def lake() -> gymnasium.Env:
        return gymnasium.make("FrozenLake-v1", map_name="4x4", max_episode_steps=200)

    mdp = read_gymnasium(lake())
    best = value_iteration(mdp, mdp.rewards, discount=0.99)
    expert = greedy_policy(mdp, action_values(mdp, mdp.rewards, best, discount=0.99))
    shown = sample_demonstrations(mdp, expert, num_episodes=300, rng=np.random.default_rng(0))
    irl = MaxCausalEntIRL(objective="likelihood", discount=0.99)
    fit = irl.fit(mdp, LinearReward(features=np.eye(16)), shown)

    def earned(reward: ndarray) -> float:
        env = LearnedReward(lake(), mdp, reward, discount=0.99)
        policy = greedy_policy(mdp, q_learning(env, discount=0.99, num_episodes=3000))
        return policy_value(mdp, mdp.rewards, policy, discount=0.99)

    by_expert = policy_value(mdp, mdp.rewards, expert, discount=0.99)
    assert earned(fit.reward) > 0.95 * by_expert
    assert earned(np.random.default_rng(3).permutation(fit.reward)) < 0.3 * by_expert
