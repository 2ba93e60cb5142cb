"""A network learns a reward and generalises it; a learner that sees only a recovered reward learns what was meant."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from numpy import ndarray

from posttrain import irl
from posttrain.irl.comparison import policy_value
from posttrain.irl_runs.environment import LearnedReward, TabularEnvironment
from posttrain.neural_irl import NeuralIRL
from tests.support.irl_worlds import aimless, random_world, slopes
from tests.support.refusals import refused


def fitted(*, shuffled: bool):
    """A 5 × 5 grid whose reward falls with the distance from a spot, shown to the network as coordinates."""
    world = irl.IcyGridWorld(5, slip=0.2, terminal=())
    y, x = np.divmod(np.arange(25), 5)
    reward = -((x - 3.0) ** 2 + (y - 1.0) ** 2) / 4
    policy = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=reward, discount=0.9)).policy
    walks = irl.sample_demonstrations(world, policy, num_episodes=60, rng=np.random.default_rng(0), max_steps=60)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    inputs = torch.tensor(np.stack([x, y], axis=1) / 4)
    if shuffled:
        inputs = inputs[torch.tensor(np.random.default_rng(1).permutation(25))]
    fit = NeuralIRL(discount=0.9, num_steps=300).fit(world, network, inputs, walks)
    return reward, policy, fit


def test_a_network_learns_where_the_demonstrator_wants_to_be() -> None:
    reward, policy, fit = fitted(shuffled=False)
    assert fit.gaps[-1] < 0.1 * fit.gaps[0]
    assert np.corrcoef(fit.reward, reward)[0, 1] > 0.9
    assert np.abs(fit.policy - policy).mean() < 0.03


def test_from_inputs_that_say_nothing_it_learns_no_such_thing() -> None:
    reward, policy, fit = fitted(shuffled=True)
    assert np.corrcoef(fit.reward, reward)[0, 1] < 0.75
    assert np.abs(fit.policy - policy).mean() > 0.06


@pytest.mark.parametrize(("horizon", "temperature"), [(None, 0.5), (9, 2.0)])
def test_the_networks_gradient_is_that_of_the_dual(horizon, temperature) -> None:
    """Central differences in every parameter.  Fitting for two steps takes one, whose gradient the network keeps."""
    rng = np.random.default_rng(0)
    mdp = random_world(rng)
    shown = {"num_episodes": 30, "rng": rng, "max_steps": horizon or 1000}
    walks = irl.sample_demonstrations(mdp, rng.dirichlet(np.ones(3), 6), **shown)
    fitter = NeuralIRL(discount=0.9, horizon=horizon, temperature=temperature, num_steps=2)
    dual = fitter.state_dual(mdp, walks)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    inputs = torch.randn(6, 3, dtype=torch.float64)

    def value(parameters: np.ndarray) -> np.ndarray:
        torch.nn.utils.vector_to_parameters(torch.tensor(parameters), network.parameters())
        with torch.no_grad():
            return np.array(dual.at(network(inputs).reshape(-1).numpy()).value)

    before = torch.nn.utils.parameters_to_vector(network.parameters()).detach().numpy().copy()
    expected = slopes(value, before)
    value(before)
    fitter.fit(mdp, network, inputs, walks)
    taken = np.concatenate([parameter.grad.numpy().ravel() for parameter in network.parameters()])
    np.testing.assert_allclose(taken, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "value"), [("discount", 1.5), ("temperature", 0.0), ("horizon", 0), ("tolerance", -1)]
)
def test_settings_of_no_problem_are_refused_at_once(name, value) -> None:
    with refused(f"{name} = {value}"):
        NeuralIRL(**{name: value})


def test_a_network_that_gives_no_reward_for_each_state_is_refused() -> None:
    world = irl.IcyGridWorld(3, terminal=())
    walks = aimless(world, 1, max_steps=3)
    with refused("gives 18 rewards for 9 states"):
        NeuralIRL(discount=0.1).fit(world, torch.nn.Linear(2, 2), torch.zeros(9, 2), walks)
    with refused("no parameter that requires a gradient"):
        NeuralIRL(discount=0.1).fit(world, torch.nn.Flatten(0), torch.zeros(9, 1), walks)


@pytest.mark.filterwarnings("ignore:.* demonstrations are truncated")
def test_it_stops_at_the_last_step_or_at_the_tolerance_and_shows_each_to_who_watches() -> None:
    world = irl.IcyGridWorld(3, terminal=())
    walks = aimless(world, 5, max_steps=9)
    network, seen = torch.nn.Linear(9, 1, bias=False).double(), []
    inputs = torch.eye(9, dtype=torch.float64)
    fit = NeuralIRL(discount=0.9, num_steps=4, tolerance=1e-12).fit(world, network, inputs, walks, watch=seen.append)
    assert seen == [{"gap": gap} for gap in fit.gaps.tolist()]
    assert len(seen) == 4
    assert fit.reward.tolist() == network.weight.flatten().tolist(), "those of the policy, not of a step further"
    assert len(NeuralIRL(discount=0.9, num_steps=4, tolerance=100.0).fit(world, network, inputs, walks).gaps) == 1
    numbers = torch.nn.Embedding(9, 1).double()
    torch.nn.init.constant_(numbers.weight[3], np.nan)
    with refused("step 0: the network's reward of state 3 is not finite"):
        NeuralIRL(discount=0.9).fit(world, numbers, torch.arange(9), walks)


@pytest.mark.filterwarnings("ignore:.* demonstrations are truncated")
def test_a_reward_for_each_state_moves_by_its_own_visits() -> None:
    """With one free number per state Adam's first step is ± the learning rate: up where demonstrations were oftener."""
    world = irl.IcyGridWorld(3, terminal=())
    walks = aimless(world, 5, max_steps=9)
    network = torch.nn.Linear(9, 1, bias=False).double()
    torch.nn.init.zeros_(network.weight)
    fitter = NeuralIRL(discount=0.9, num_steps=2, learning_rate=0.05, weight_decay=0.0)
    fit = fitter.fit(world, network, torch.eye(9, dtype=torch.float64), walks)
    dual = fitter.state_dual(world, walks)
    np.testing.assert_allclose(fit.reward, -0.05 * np.sign(dual.at(np.zeros(9)).gradient), rtol=1e-5)
    with refused("demonstration 0 was truncated"):
        NeuralIRL(discount=1.0).state_dual(world, walks)


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
    world = irl.IcyGridWorld(4, slip=0.1)
    expert = irl.soft_policy_iteration(irl.Problem(mdp=world, reward=EXPERT_REWARD, discount=0.9, temperature=0.5))
    shown = irl.sample_demonstrations(world, expert.policy, num_episodes=500, rng=np.random.default_rng(0))
    fitter = irl.MaxCausalEntIRL(objective="likelihood", discount=0.9, temperature=0.5)
    fit = fitter.fit(world, irl.LinearReward(features=np.eye(16)), shown)

    def lost(reward: ndarray) -> float:
        env = LearnedReward(TimeLimit(TabularEnvironment(world), 60), world, reward, discount=0.9)
        policy = irl.greedy_policy(world, q_learning(env, discount=0.9, num_episodes=1500))
        return irl.expected_value_difference(world, EXPERT_REWARD, policy, discount=0.9)

    assert lost(fit.reward) < 0.25
    # The control: the same numbers, dealt to other states.
    assert lost(np.random.default_rng(3).permutation(fit.reward)) > 1.0


def test_on_a_frozen_lake_of_gymnasium_q_learning_acts_as_the_expert_who_was_watched() -> None:
    def lake() -> gymnasium.Env:
        return gymnasium.make("FrozenLake-v1", map_name="4x4", max_episode_steps=200)

    mdp = irl.read_gymnasium(lake())
    best = irl.value_iteration(mdp, mdp.rewards, discount=0.99)
    expert = irl.greedy_policy(mdp, irl.action_values(mdp, mdp.rewards, best, discount=0.99))
    shown = irl.sample_demonstrations(mdp, expert, num_episodes=300, rng=np.random.default_rng(0))
    fitter = irl.MaxCausalEntIRL(objective="likelihood", discount=0.99)
    fit = fitter.fit(mdp, irl.LinearReward(features=np.eye(16)), shown)

    def earned(reward: ndarray) -> float:
        env = LearnedReward(lake(), mdp, reward, discount=0.99)
        policy = irl.greedy_policy(mdp, q_learning(env, discount=0.99, num_episodes=3000))
        return policy_value(mdp, mdp.rewards, policy, discount=0.99)

    by_expert = policy_value(mdp, mdp.rewards, expert, discount=0.99)
    assert earned(fit.reward) > 0.95 * by_expert
    assert earned(np.random.default_rng(3).permutation(fit.reward)) < 0.3 * by_expert
