"""What an actor-critic run remembers from step to step beside weights: plain numbers, saved with every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.kl import next_coefficient
from posttrain.algorithms.reward_shaping import RewardStatistics, scaled_rewards
from posttrain.errors import RunError

EXPLAINED = "value/explained_variance"
COMPLETION_KL, TOKEN_KL = "kl_completion", "kl_token"
"""Names of the metrics that decide what the next steps do."""
STATE = "actor_critic"
"""Its name in a checkpoint's state."""
LEAST_EXPLAINED = 1e-6
"""Of the variance of returns: what is less is the rounding of a critic that says the same of everything."""


NO_REWARDS = RewardStatistics()
"""Before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticState:
    """Of the run so far."""

    kl_coefficient: float = 0.0
    """Of the KL in the reward; 0 where there is none."""
    rewards: RewardStatistics = NO_REWARDS
    begun: bool = False
    """Whether the critic has learned anything."""
    fitted: bool = True
    """Whether the policy moves: the critic is good enough, or there is none."""
    fit_steps: int = 0
    """Steps in which the critic learned alone."""


NO_STATE = ActorCriticState()
"""Of algorithms that have neither a critic nor a KL or a scale of rewards."""


def remembers(algorithm: Algorithm) -> bool:
    """Whether steps change what is remembered, so that no checkpoint may lack it."""
    return algorithm.critic is not None or algorithm.adaptive_kl is not None or algorithm.reward_scaling is not None


def state_json(state: ActorCriticState, algorithm: Algorithm) -> dict[str, object]:
    """As state.json keeps it: of algorithms that remember nothing, nothing."""
    return {STATE: asdict(state)} if remembers(algorithm) else {}


def at_first(algorithm: Algorithm, *, begun: bool) -> ActorCriticState:
    """Before the first step; `begun` where the critic comes from a folder."""
    penalty, critic = algorithm.kl_penalty, algorithm.critic
    return ActorCriticState(
        kl_coefficient=0.0 if penalty is None else penalty.coefficient,
        begun=begun,
        fitted=critic is None or critic.fit_steps == 0,
    )


def from_json(saved: Mapping[str, Any]) -> ActorCriticState:
    """What `as_json` keeps under its name."""
    return ActorCriticState(**{**saved, "rewards": RewardStatistics(**saved["rewards"])})


def restored(saved: Mapping[str, object], at_first: ActorCriticState, algorithm: Algorithm) -> ActorCriticState:
    """What a checkpoint's state says; as at first where it says nothing and nothing could have changed.

    Raises RunError where something could.
    """
    said = saved.get(STATE)
    if isinstance(said, Mapping):
        return from_json(said)
    if not remembers(algorithm):
        return at_first
    raise RunError(
        f"the checkpoint does not say what {algorithm.name} remembered of earlier steps: an earlier version made it."
        "  Begin the run again."
    )


def with_rewards(
    state: ActorCriticState, rewards: Float64[Tensor, "prompt group"], algorithm: Algorithm
) -> tuple[ActorCriticState, Float64[Tensor, "prompt group"]]:
    """What is remembered once a step's rewards are seen, and the rewards as credit is made of them."""
    if algorithm.reward_scaling is None:
        return state, rewards
    seen = replace(state, rewards=state.rewards.with_rewards(rewards))
    return seen, scaled_rewards(rewards, seen.rewards, algorithm.reward_scaling)


def after_step(
    state: ActorCriticState, metrics: Mapping[str, float], num_rollouts: int, algorithm: Algorithm
) -> ActorCriticState:
    """What is remembered once a step has been measured: the next KL coefficient, and whether the policy moves in it.

    While the critic learns alone the KL is 0 whatever its coefficient is, and says nothing of that.
    """
    adaptive = algorithm.adaptive_kl
    if adaptive is not None and state.fitted:
        kl = metrics[COMPLETION_KL if adaptive.per == "sequence" else TOKEN_KL]
        new = next_coefficient(state.kl_coefficient, kl, num_rollouts=num_rollouts, options=adaptive)
        state = replace(state, kl_coefficient=new)
    if state.fitted or algorithm.critic is None:
        return state
    good = metrics.get(EXPLAINED, 0.0) > LEAST_EXPLAINED
    if good or state.fit_steps >= algorithm.critic.fit_steps:
        return replace(state, fitted=True)
    return replace(state, fit_steps=state.fit_steps + 1)
