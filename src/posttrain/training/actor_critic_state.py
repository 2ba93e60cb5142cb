"""The state of an actor-critic run apart from weights: plain numbers, saved with every checkpoint; and its metrics."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence
from posttrain.algorithms.gae import LEAST_DEVIATION
from posttrain.algorithms.kl import next_coefficient
from posttrain.algorithms.reward_shaping import RewardStatistics, scaled_rewards
from posttrain.errors import RunError

EXPLAINED = "value/explained_variance"
COMPLETION_KL, TOKEN_KL = "kl_completion", "kl_token"
"""Names of the metrics that decide the next steps."""
STATE = "actor_critic"
"""Its name in a checkpoint's state."""
SHIFT, SCALE = "whitening/mean", "whitening/deviation"
"""Metrics of what a step's advantages were whitened by."""
LEAST_EXPLAINED = 1e-6
"""Share of the variance of returns; a critic that predicts a constant explains less, by rounding."""
NO_REWARDS = RewardStatistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticState:
    """The run so far."""

    kl_coefficient: float = 0.0
    """Of the KL in the reward; 0 without one."""
    rewards: RewardStatistics = NO_REWARDS
    begun: bool = False
    """Whether the critic has learned anything."""
    fitted: bool = True
    """Whether the policy learns: the critic is good enough, or there is none."""
    fit_steps: int = 0
    """Steps in which only the critic learned."""


NO_STATE = ActorCriticState()
"""The state of algorithms without a critic, a KL in the reward or scaled rewards."""


def remembers(algorithm: Algorithm) -> bool:
    return algorithm.critic is not None or algorithm.adaptive_kl is not None or algorithm.reward_scaling is not None


def state_json(state: ActorCriticState, algorithm: Algorithm) -> dict[str, object]:
    return {STATE: asdict(state)} if remembers(algorithm) else {}


def at_first(algorithm: Algorithm, *, begun: bool) -> ActorCriticState:
    penalty, critic = algorithm.kl_penalty, algorithm.critic
    return ActorCriticState(
        kl_coefficient=0.0 if penalty is None else penalty.coefficient,
        begun=begun,
        fitted=critic is None or critic.fit_steps == 0,
    )


def restored(saved: Mapping[str, object], at_first: ActorCriticState, algorithm: Algorithm) -> ActorCriticState:
    """The state in a checkpoint.  Raises RunError where it lacks one that steps may have changed."""
    found = saved.get(STATE)
    if isinstance(found, Mapping):
        return ActorCriticState(**{**found, "rewards": RewardStatistics(**found["rewards"])})
    if remembers(algorithm):
        raise RunError(f"the checkpoint does not say what {algorithm.name} remembered of steps.  Begin the run again.")
    return at_first


def with_rewards(
    state: ActorCriticState, rewards: Float64[Tensor, "prompt group"], algorithm: Algorithm
) -> tuple[ActorCriticState, Float64[Tensor, "prompt group"]]:
    if algorithm.reward_scaling is None:
        return state, rewards
    seen = replace(state, rewards=state.rewards.with_rewards(rewards))
    return seen, scaled_rewards(rewards, seen.rewards, algorithm.reward_scaling)


def after_step(
    state: ActorCriticState, metrics: Mapping[str, float], num_rollouts: int, algorithm: Algorithm
) -> ActorCriticState:
    """The state after a step: the next KL coefficient, and whether the policy learns.

    While only the critic learns, the KL is 0 whatever its coefficient, so the coefficient stays.
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


def explained_variance(returns: Float64[Tensor, " token"], values: Float64[Tensor, " token"]) -> float | None:
    """Share of the variance of returns that the values explain; None where all returns are equal.

    EV = 1 - Var(R - V) / Var(R)        1: exact, 0: no better than a constant, below 0: worse
    """
    variance = returns.var(correction=0)
    if not len(returns) or not variance >= LEAST_DEVIATION**2:  # sums of rewards that are all equal differ by rounding
        return None
    return 1 - ((returns - values).var(correction=0) / variance).item()


def value_metrics(evidence: Evidence, credit: Credit) -> dict[str, float]:
    """Metrics of a step's values and returns; none where no critic or no reward is."""
    counted = ~evidence.rewards.isnan().flatten()[evidence.rollout]  # tokens of completions that have a reward
    if credit.returns is None or "values" not in evidence.known or not bool(counted.any()):
        return {}
    returns, values = credit.returns[counted], evidence.values[counted]
    explained = explained_variance(returns, values)
    return {
        **({} if explained is None else {EXPLAINED: explained}),
        "value/mean": values.mean().item(),
        "returns/mean": returns.mean().item(),
        "returns/std": returns.std(correction=0).item(),
    }


def penalty_metrics(evidence: Evidence) -> dict[str, float]:
    """Estimates (k1) of the KL to the reference, per completion and per token, in nats.

    mean over completions of Σ_t x_t,   mean over tokens of x_t        x = log μ - log ref
    """
    ratios = evidence.behaviour_logprobs - evidence.reference_logprobs
    total = ratios.sum().item()
    return {COMPLETION_KL: total / evidence.rewards.numel(), TOKEN_KL: total / len(ratios)}


def credit_metrics(
    evidence: Evidence, credit: Credit, algorithm: Algorithm, state: ActorCriticState
) -> dict[str, float]:
    """Metrics of a step's credit; `state` is the one that credit was computed with."""
    metrics = value_metrics(evidence, credit)
    if credit.whitening is not None:
        metrics |= {SHIFT: credit.whitening.shift, SCALE: credit.whitening.scale}
    if algorithm.kl_penalty is not None and (algorithm.critic is not None or algorithm.adaptive_kl is not None):
        metrics |= penalty_metrics(evidence) | {"kl_coefficient": state.kl_coefficient}
    if algorithm.reward_scaling is not None:
        metrics["reward_scaled"] = evidence.rewards.nanmean().item()
    return metrics
