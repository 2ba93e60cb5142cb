"""Metrics of credit that is made token by token: how good the values were, and what the returns are."""

from jaxtyping import Bool, Float64
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence
from posttrain.algorithms.gae import LEAST_DEVIATION
from posttrain.training.actor_critic.actor_critic_state import COMPLETION_KL, EXPLAINED, TOKEN_KL, ActorCriticState

SHIFT, SCALE = "whitening/mean", "whitening/deviation"
"""Names of what the advantages of a step were whitened by."""


def explained_variance(returns: Float64[Tensor, " token"], values: Float64[Tensor, " token"]) -> float | None:
    """Share of the variance of returns that the values account for; None where all returns are alike.

        EV = 1 - Var(R - V) / Var(R)

    1: they knew.  0: no better than one number for all.  Below 0: worse than that.
    """
    variance = returns.var(correction=0)
    if not len(returns) or not variance >= LEAST_DEVIATION**2:  # sums of rewards that are all equal differ by rounding
        return None
    return 1 - ((returns - values).var(correction=0) / variance).item()


def counted_tokens(evidence: Evidence) -> Bool[Tensor, " token"]:
    """Tokens of completions that have a reward."""
    return ~evidence.rewards.isnan().flatten()[evidence.rollout]


def value_metrics(evidence: Evidence, credit: Credit) -> dict[str, float]:
    """What is told of a step's values and returns; nothing where there are none."""
    counted = counted_tokens(evidence)
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
    """The KL to the reference as the sampled tokens estimate it, of completions and of tokens, in nats.

    mean over completions of Σ_t x_t,   mean over tokens of x_t        x = log μ - log ref, k1
    """
    ratios = evidence.behaviour_logprobs - evidence.reference_logprobs
    total = ratios.sum().item()
    return {COMPLETION_KL: total / evidence.rewards.numel(), TOKEN_KL: total / len(ratios)}


def credit_metrics(
    evidence: Evidence, credit: Credit, algorithm: Algorithm, state: ActorCriticState
) -> dict[str, float]:
    """All that credit tells of a step; `state` is what credit was made with."""
    metrics = value_metrics(evidence, credit)
    if credit.whitening is not None:
        metrics |= {SHIFT: credit.whitening.shift, SCALE: credit.whitening.scale}
    if algorithm.kl_penalty is not None and (algorithm.critic is not None or algorithm.adaptive_kl is not None):
        metrics |= penalty_metrics(evidence) | {"kl_coefficient": state.kl_coefficient}
    if algorithm.reward_scaling is not None:
        metrics["reward_scaled"] = evidence.rewards.nanmean().item()
    return metrics
