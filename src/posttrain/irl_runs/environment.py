"""Training on a learned reward with any library that takes gymnasium environments.

    env = LearnedReward(gymnasium.make("FrozenLake-v1", map_name="8x8"), mdp, fit.reward, discount=0.99)
    PPO("MlpPolicy", env).learn(100_000)

`TabularEnvironment` makes an environment of a world that is only a table, such as `IcyGridWorld`.
"""

from collections.abc import Callable
from typing import Any

from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl import arguments
from posttrain.irl.episode_sampling import cumulative
from posttrain.irl.mdp import TabularMDP
from posttrain.irl.planning import at_ends, per_action, reward_array
from posttrain.irl_runs import require_library

require_library("gymnasium")

import gymnasium  # noqa: E402
from gymnasium.utils import RecordConstructorArgs  # noqa: E402

Observed = Any
"""An observation of the wrapped environment."""


class LearnedReward(gymnasium.Wrapper[Observed, int, Observed, int], RecordConstructorArgs):
    """An environment that pays the learned reward; its original reward is in `info["environment_reward"]`.

        r_t = r(s_t, a_t),   and on ending in a terminal state  r_t = r(s_t, a_t) + γ r(s_{t+1})

    Σ γᵗ r_t of an episode is its value in `posttrain.irl`: a reward per state is earned on acting there, and in a
    terminal state on arriving, one step later.  A reward of the next state is paid as its expectation.  A truncated
    episode earns nothing in its last state.
    """

    def __init__(
        self,
        env: "gymnasium.Env[Observed, int]",
        mdp: TabularMDP,
        reward: arguments.Numbers,
        *,
        discount: float,
        state_of: Callable[[Observed], int] = int,
    ) -> None:
        """`mdp` is the world in which `reward` was learned; `discount` the one that training uses.

        `state_of` maps an observation to the environment's state number, where it is not that number itself.
        """
        if not isinstance(env, gymnasium.Env):
            raise UserError(f"env is {arguments.brief_repr(env)}: give an environment of gymnasium")
        arguments.require_callable(state_of, "state_of", "an observation")
        paid = reward_array(mdp, reward)
        arguments.checked_number(discount, "discount", arguments.SHARE)
        # `gymnasium.make(env.spec)`, which some libraries and `check_env` call, makes the wrapper again from these.
        RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, mdp=mdp, reward=reward, discount=discount, state_of=state_of
        )
        gymnasium.Wrapper.__init__(self, env)
        self._mdp, self._state_of, self._discount = mdp, state_of, discount
        self._per_action, self._at_ends = per_action(mdp, paid), at_ends(mdp, paid)
        self._state = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observed, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._state = self._index(observation)
        return observation, info

    def step(self, action: int) -> tuple[Observed, float, bool, bool, dict[str, Any]]:
        # A plain integer, as not every table has numpy's as keys.
        before, chosen = self._state, action_number(action, self._mdp)
        if before < 0:
            raise UserError("no episode has begun: call reset() first")
        observation, paid, terminated, truncated, info = self.env.step(chosen)
        self._state = self._index(observation)
        if terminated and not self._mdp.terminal[self._state]:
            raise UserError(
                f"the environment ends an episode in state {self._mdp.states[self._state]}, which is not terminal in"
                " the world of the learned reward: use the world that was read from this environment"
            )
        # Only in terminal states is there anything to earn on arriving.
        reward = float(self._per_action[before, chosen] + self._discount * self._at_ends[self._state])
        return observation, reward, terminated, truncated, {**info, "environment_reward": float(paid)}

    def _index(self, observation: Observed) -> int:
        try:
            state = int(self._state_of(observation))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the environment shows {arguments.brief_repr(observation)}, and state_of makes no state number of it"
                f" ({error}): give another `state_of`"
            ) from error
        if state not in self._mdp.numbers:
            raise UserError(
                f"the environment is in state {state}, which the world of the learned reward does not have: use the"
                " world that was read from this environment, or another `state_of`"
            )
        return self._mdp.numbers[state]


class TabularEnvironment(gymnasium.Env[Any, Any]):
    """A world that is a table, as an environment whose observations are the numbers of its states.

    It pays the world's reward and has no time limit (gymnasium's `TimeLimit` adds one).
    """

    def __init__(self, mdp: TabularMDP) -> None:
        super().__init__()
        self.mdp = arguments.require_kind(mdp, TabularMDP, "mdp")
        self.observation_space = gymnasium.spaces.Discrete(int(mdp.states.max()) + 1)
        self.action_space = gymnasium.spaces.Discrete(mdp.num_actions)
        self._starts: ndarray = cumulative(mdp.start)
        self._state = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self._state = int(self._starts.searchsorted(self.np_random.random(), side="right"))
        return int(self.mdp.states[self._state]), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self._state < 0 or self.mdp.terminal[self._state]:
            raise UserError("the episode is over, or has not begun: call reset() first")
        chosen = action_number(action, self.mdp)
        row, table = self._state * self.mdp.num_actions + chosen, self.mdp.transitions
        reward = float(self.mdp.rewards[self._state, chosen])
        first, last = table.indptr[row], table.indptr[row + 1]
        outcome = cumulative(table.data[first:last]).searchsorted(self.np_random.random(), side="right")
        self._state = int(table.indices[first + outcome])
        return int(self.mdp.states[self._state]), reward, bool(self.mdp.terminal[self._state]), False, {}


def action_number(action: object, mdp: TabularMDP) -> int:
    chosen = arguments.checked_integer(action, "action")
    if not 0 <= chosen < mdp.num_actions:
        raise UserError(f"action = {chosen}: actions are 0 to {mdp.num_actions - 1}")
    return chosen
