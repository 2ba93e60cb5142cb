"""What an episode earns in a wrapped environment is what `posttrain.irl` pays for it, whatever the environment."""

import subprocess
import sys
from collections.abc import Sequence

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings, strategies as st
from numpy import ndarray

from posttrain import irl
from posttrain.irl.comparison import policy_value
from posttrain.irl.counting import in_world
from posttrain.irl.features import Place
from posttrain.irl_runs.environment import LearnedReward, TabularEnvironment
from tests.support.irl_worlds import Zeros, features_of, newest, random_world, uniform_policy
from tests.support.refusals import refused


def walked(env: gymnasium.Env, rng: np.random.Generator) -> tuple[irl.Episode, list[float]]:
    """An episode of random actions, and what each paid."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    states, actions, rewards = [observation], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        actions.append(int(rng.integers(env.action_space.n)))
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        states.append(observation)
        rewards.append(reward)
    return irl.Episode(states, actions, terminated=terminated, truncated=truncated), rewards


def discounted(rewards: Sequence[float], discount: float) -> float:
    return sum(discount**time * reward for time, reward in enumerate(rewards))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    discount=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    place=st.sampled_from(["state", "state_action"]),
    limit=st.sampled_from([1, 3, 100]),
)
def test_the_discounted_return_of_an_episode_is_its_features_times_the_weights(seed, discount, place, limit) -> None:
    rng = np.random.default_rng(seed)
    mdp = random_world(rng, num_ends=2)
    features = features_of(mdp, rng, place).bound(mdp)
    weights = rng.normal(size=3)
    env = TimeLimit(TabularEnvironment(mdp), limit)
    episode, rewards = walked(LearnedReward(env, mdp, features.rewards(weights), discount=discount), rng)
    known = in_world(irl.Demonstrations.from_episodes([episode]), mdp)
    # Counting and planning are tied together by the gradient laws: whoever pays like this can be trained on.
    paid = float(features.per_episode(known, discount)[0] @ weights)
    assert discounted(rewards, discount) == pytest.approx(paid, abs=1e-12)


@pytest.mark.parametrize("place", ["state", "next_state"])
def test_the_mean_return_of_many_episodes_is_the_value_of_the_policy(place: Place) -> None:
    rng = np.random.default_rng(0)
    mdp, discount = random_world(rng, num_ends=2), 0.9
    features = features_of(mdp, rng, place).bound(mdp)
    reward = features.rewards(rng.normal(size=3))
    env = LearnedReward(TabularEnvironment(mdp), mdp, reward, discount=discount)
    returns = [discounted(walked(env, rng)[1], discount) for _ in range(3000)]
    value = policy_value(mdp, reward, uniform_policy(mdp), discount=discount)
    error = np.std(returns) / np.sqrt(len(returns))
    assert abs(np.mean(returns) - value) < 4 * error
    assert error < abs(value) / 10, "else the line above says nothing"


def test_states_that_gymnasium_numbers_with_gaps_are_found_and_its_own_reward_is_kept() -> None:
    env = gymnasium.make(newest("Taxi"))
    mdp = irl.read_gymnasium(env)
    assert mdp.num_states < int(mdp.states.max()) + 1, "some numbers are never reached"
    reward = np.arange(mdp.num_states, dtype=float)
    learned = LearnedReward(env, mdp, reward, discount=0.9)
    observation, _ = learned.reset(seed=3)
    for action in (0, 1, 2, 3, 4, 5):
        before = observation
        observation, paid, terminated, _, info = learned.step(action)
        assert not terminated
        assert paid == np.flatnonzero(mdp.states == before)[0]
        assert info["environment_reward"] == (-10 if action >= 4 else -1), "there is nobody to pick up or drop here"


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
def test_environments_pass_the_checks_of_gymnasium() -> None:
    mdp = random_world(np.random.default_rng(1))
    check_env(TabularEnvironment(mdp), skip_render_check=True)
    check_env(LearnedReward(TabularEnvironment(mdp), mdp, np.ones(6), discount=0.9), skip_render_check=True)
    check_env(lake(np.ones(16)), skip_render_check=True)
    assert TabularEnvironment(mdp).observation_space.n == mdp.num_states


def lake(reward: ndarray) -> LearnedReward:
    env = gymnasium.make("FrozenLake-v1", map_name="4x4")
    return LearnedReward(env, irl.read_gymnasium(env), reward, discount=0.9)


def test_an_environment_made_again_from_its_spec_pays_the_same() -> None:
    env = lake(np.random.default_rng(0).normal(size=16))
    again = gymnasium.make(env.spec)
    for seed in range(5):
        (episode, paid), (second, paid_again) = (walked(each, np.random.default_rng(seed)) for each in (env, again))
        assert [*episode.states] == [*second.states]
        assert paid == paid_again


def test_environments_side_by_side_pay_what_each_pays_alone() -> None:
    reward = np.random.default_rng(0).normal(size=16)
    together = SyncVectorEnv([lambda: lake(reward)] * 3)
    alone = [lake(reward) for _ in range(3)]
    together.reset(seed=7)
    for seed, env in enumerate(alone, start=7):
        env.reset(seed=seed)
    for step in range(4):  # by then none of these seeds has fallen into a hole
        actions = np.array([0, 1, step % 2])
        _, paid, ended, _, info = together.step(actions)
        assert not ended.any()
        assert paid.tolist() == [env.step(action)[1] for env, action in zip(alone, actions, strict=True)]
        assert info["environment_reward"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("action", [1, np.int64(1), np.array(1), np.int32(1)])
def test_an_action_may_be_a_number_of_any_kind_of_integer(action: object) -> None:
    mdp = random_world(np.random.default_rng(2))
    for env in (TabularEnvironment(mdp), lake(np.arange(16.0))):
        env.reset(seed=0)
        expected = env.step(1)
        env.reset(seed=0)
        assert env.step(action) == expected


@pytest.mark.parametrize("action", [-1, 3])
def test_an_action_that_a_table_does_not_have_is_refused(action: int) -> None:
    env = TabularEnvironment(random_world(np.random.default_rng(2)))
    env.reset(seed=0)
    with refused(f"action = {action}: actions are 0 to 2"):
        env.step(action)


def test_an_episode_never_begins_where_none_does() -> None:
    env = TabularEnvironment(irl.GridWorld(3, start=[0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    env.np_random = Zeros()
    assert env.reset()[0] == 1


def test_a_seed_makes_the_same_episode_again() -> None:
    env = TabularEnvironment(random_world(np.random.default_rng(2)))
    first, second = (walked(env, np.random.default_rng(5)) for _ in range(2))
    assert [*first[0].states] == [*second[0].states]
    assert [*first[0].states] != [*walked(env, np.random.default_rng(6))[0].states]


def test_a_world_that_is_not_that_of_the_environment_is_refused() -> None:
    lake = gymnasium.make("FrozenLake-v1", map_name="8x8")
    small = irl.read_gymnasium(gymnasium.make("FrozenLake-v1", map_name="4x4"))
    learned = LearnedReward(lake, small, np.zeros(16), discount=1.0, state_of=lambda seen: int(seen) + 99)
    with refused("the environment is in state 99, which the world"):
        learned.reset(seed=0)
    endless = irl.TabularMDP.from_dense(np.full((64, 4, 64), 1 / 64), layout="state action next", start=0, terminal=[])
    learned = LearnedReward(lake, endless, np.zeros(64), discount=0.9)
    with refused("ends an episode in state … which is not terminal"):
        walked(learned, np.random.default_rng(0))
    with refused("the reward has the shape (3,)"):
        LearnedReward(lake, endless, np.zeros(3), discount=0.9)
    with refused("discount = 1.5"):
        LearnedReward(lake, endless, np.zeros(64), discount=1.5)
    with refused("call reset"):
        TabularEnvironment(endless).step(0)


def test_it_has_a_short_name_that_loads_gymnasium_only_when_it_is_used_and_never_torch() -> None:
    program = "import sys, posttrain; early = 'gymnasium' in sys.modules; wrapper = posttrain.LearnedReward; "
    program += "print(early, wrapper.__name__, *(name in sys.modules for name in ('gymnasium', 'torch')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "LearnedReward", "True", "False"]
