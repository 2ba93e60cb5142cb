"""A reinforcement learner that sees only the recovered reward learns what the demonstrator was after."""

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit
from numpy import ndarray

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.comparison import expected_value_difference
from posttrain.irl.grids import IcyGridWorld
from posttrain.irl.planning import Problem, greedy_policy, soft_policy_iteration
from posttrain.irl.rewards import LinearReward
from posttrain.irl.sampling import sample_demonstrations
from posttrain.recovery.environment import LearnedReward, TabularEnvironment

DISCOUNT = 0.9
EXPERT_REWARD = np.array([-1.0, -1, -1, -1, -4, -4, -1, -4, -1, -1, -1, -1, -4, -4, -4, 0])
"""A 4 × 4 grid with a puddle between the start and the goal, and one dry way round it."""


def q_learning(env: gymnasium.Env, *, num_episodes: int, seed: int) -> ndarray:
    """Action values by Watkins' tabular Q-learning, from uniform behaviour."""
    rng = np.random.default_rng(seed)
    values = np.zeros((16, 4))
    for episode in range(num_episodes):
        state, _ = env.reset(seed=seed + episode)
        done = False
        while not done:
            action = int(rng.integers(4))
            following, reward, terminated, truncated, _ = env.step(action)
            ahead = 0.0 if terminated else DISCOUNT * values[following].max()
            values[state, action] += 0.1 * (reward + ahead - values[state, action])
            state, done = following, terminated or truncated
    return values


def test_q_learning_on_the_recovered_reward_goes_where_the_expert_wanted() -> None:
    world = IcyGridWorld(4, slip=0.1)
    expert = soft_policy_iteration(Problem(mdp=world, reward=EXPERT_REWARD, discount=DISCOUNT, temperature=0.5))
    shown = sample_demonstrations(world, expert.policy, num_episodes=500, rng=np.random.default_rng(0))
    irl = MaxCausalEntIRL(objective="likelihood", discount=DISCOUNT, temperature=0.5)
    fit = irl.fit(world, LinearReward(features=np.eye(16)), shown)

    def lost(reward: ndarray) -> float:
        env = LearnedReward(TimeLimit(TabularEnvironment(world), 60), world, reward, discount=DISCOUNT)
        policy = greedy_policy(world, q_learning(env, num_episodes=1500, seed=1))
        return expected_value_difference(world, EXPERT_REWARD, policy, discount=DISCOUNT)

    assert lost(fit.reward) < 0.25
    # The control: the same numbers, dealt to other states.
    assert lost(np.random.default_rng(3).permutation(fit.reward)) > 1.0
