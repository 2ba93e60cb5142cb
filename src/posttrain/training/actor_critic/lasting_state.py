"""What an actor-critic run remembers from step to step beside weights: plain numbers, saved with every checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.actor_critic.lasting import (
    RewardStatistics,
    next_coefficient,
    scaled_rewards,
)
from posttrain.algorithms.algorithm import Algorithm

EXPLAINED = "value/explained_variance"
COMPLETION_KL, TOKEN_KL = "kl_completion", "kl_token"
"""Names of the metrics that decide what the next steps do."""
LASTING = "lasting"
"""Where a checkpoint's state keeps what a run remembers."""
LEAST_EXPLAINED = 1e-6
"""Of the variance of returns: what is less is the rounding of a critic that says the same of everything."""


NO_REWARDS = RewardStatistics()
"""Before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
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

    def as_json(self) -> dict[str, object]:
        """As state.json keeps it."""
        return asdict(self)


NOTHING = Lasting()
"""What algorithms remember that have neither a critic nor a KL or a scale of rewards."""


def at_first(algorithm: Algorithm, *, begun: bool) -> Lasting:
    """Before the first step; `begun` where the critic comes from a folder."""
    penalty, critic = algorithm.kl_penalty, algorithm.critic
    return Lasting(
        kl_coefficient=0.0 if penalty is None else penalty.coefficient,
        begun=begun,
        fitted=critic is None or critic.fit_steps == 0,
    )


def from_json(saved: Mapping[str, Any]) -> Lasting:
    """What `as_json` gave."""
    return Lasting(**{**saved, "rewards": RewardStatistics(**saved["rewards"])})


def with_rewards(
    lasting: Lasting, rewards: Float64[Tensor, "prompt group"], algorithm: Algorithm
) -> tuple[Lasting, Float64[Tensor, "prompt group"]]:
    """What is remembered once a step's rewards are seen, and the rewards as credit is made of them."""
    if algorithm.reward_scaling is None:
        return lasting, rewards
    seen = replace(lasting, rewards=lasting.rewards.with_rewards(rewards))
    return seen, scaled_rewards(rewards, seen.rewards, algorithm.reward_scaling)


def after_step(lasting: Lasting, metrics: Mapping[str, float], num_rollouts: int, algorithm: Algorithm) -> Lasting:
    """What is remembered once a step has been measured: the next KL coefficient, and whether the policy moves in it."""
    adaptive = algorithm.adaptive_kl
    if adaptive is not None:
        kl = metrics[COMPLETION_KL if adaptive.per == "sequence" else TOKEN_KL]
        new = next_coefficient(lasting.kl_coefficient, kl, num_rollouts=num_rollouts, options=adaptive)
        lasting = replace(lasting, kl_coefficient=new)
    if lasting.fitted or algorithm.critic is None:
        return lasting
    good = metrics.get(EXPLAINED, 0.0) > LEAST_EXPLAINED
    if good or lasting.fit_steps >= algorithm.critic.fit_steps:
        return replace(lasting, fitted=True)
    return replace(lasting, fit_steps=lasting.fit_steps + 1)
