"""PPO with a value head: the row of the table, and its rule of credit."""

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from posttrain.algorithms.advantages import leave_one_out
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.correction import Correction, corrected
from posttrain.algorithms.credit import Credit, Evidence
from posttrain.algorithms.gae import (
    LEAST_DEVIATION,
    GaeOptions,
    ValuedTokens,
    adaptive_lambda,
    generalised_advantages,
    one_step_advantages,
    value_targets,
    whitened,
    whitening_of,
)
from posttrain.algorithms.kl import AdaptiveKl
from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.algorithms.reward_shaping import MissingStop, RewardScaling, rewards_with_missing_stops
from posttrain.algorithms.terms import KlTerm, LossTerm, kl_term, policy_term
from posttrain.algorithms.token_weights import WEIGHTINGS, Weighting
from posttrain.algorithms.value_terms import (
    DEFAULT_VALUE_LOSS,
    ValueLossOptions,
    entropy_term,
    value_term,
)
from posttrain.errors import UserError
from posttrain.needs import Need
from posttrain.options.critic import DEFAULT_CRITIC, CriticOptions
from posttrain.options.training import Passes

Baseline = Literal["critic", "leave_one_out", "none"]
Whitening = Literal["mean_and_deviation", "deviation", "none"]

LARGEST_RATIO = math.exp(20.0)
"""Of a token with a negative advantage, which the clip does not hold back: exp of more would soon be infinite."""
PAPERS_GAE = GaeOptions()
"""γ = 1, λ = .95 for the policy and 1 for the values."""


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    gae: GaeOptions = PAPERS_GAE,
    baseline: Baseline = "critic",
    critic: CriticOptions = DEFAULT_CRITIC,
    value_loss: ValueLossOptions = DEFAULT_VALUE_LOSS,
    whitening: Whitening = "mean_and_deviation",
    entropy_bonus: float = 0.0,
    missing_stop_penalty: float = 0.0,
    missing_stop_cap: bool = False,
    reward_scaling: RewardScaling | None = None,
    token_weights: Weighting = "mean_over_tokens",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
    adaptive_kl: AdaptiveKl | None = None,
    largest_epoch_kl: float | None = 0.02,
) -> Algorithm:
    """Schulman et al. 2017, arXiv:1707.06347, for language models: a value for every token, GAE, a clipped surrogate.

    `baseline` is what rewards are compared with: a critic's values, the other completions of the prompt, or nothing.
    `missing_stop_penalty` is taken off the reward of a completion that was cut off; with `missing_stop_cap` that is at
    most the least of the step's completions that stopped.  `largest_epoch_kl`, in nats per token, is the KL to the
    policy that sampled beyond which no further update of a step is taken.
    """
    if baseline != "critic":
        require_no_critic_options(baseline, critic, value_loss, gae)
    require_adaptable(kl, adaptive_kl)
    if largest_epoch_kl is not None and not largest_epoch_kl > 0:
        raise UserError(
            f"largest_epoch_kl = {largest_epoch_kl}: would leave out every update; use more than 0, or null."
        )
    dual = max(LARGEST_RATIO, 1 + clip_high) if dual_clip is None else dual_clip
    clip = ClipRange(low=clip_low, high=clip_high, dual=dual)
    has_critic, in_loss = baseline == "critic", kl is not None and kl.place == "loss"
    policy = corrected(policy_term(clipped_surrogate, clip=clip), correction)
    credit = partial(
        actor_critic_credit,
        gae=gae,
        baseline=baseline,
        whitening=whitening,
        missing_stop=MissingStop(penalty=missing_stop_penalty, cap=missing_stop_cap),
        value_clip=value_loss.clip if has_critic else None,
    )
    return Algorithm(
        name="ppo",
        credit=credit,
        terms=loss_terms(policy, kl if in_loss else None, entropy_bonus, value_loss if has_critic else None),
        token_weights=WEIGHTINGS[token_weights],
        kl_penalty=None if in_loss else kl,
        least_group_size=2 if baseline == "leave_one_out" else 1,
        critic=critic if has_critic else None,
        credit_needs=frozenset({Need.VALUES}) if has_critic else frozenset(),
        adaptive_kl=adaptive_kl,
        reward_scaling=reward_scaling,
        passes=Passes(epochs=2, minibatches=4),
        largest_epoch_kl=largest_epoch_kl,
    )


def loss_terms(
    policy: LossTerm, kl: KlTerm | None, entropy_bonus: float, value_loss: ValueLossOptions | None
) -> tuple[LossTerm, ...]:
    """The policy's term and those of the others that are asked for."""
    more = [] if kl is None else [kl_term(kl)]
    more += [entropy_term(entropy_bonus)] if entropy_bonus else []
    more += [] if value_loss is None else [value_term(value_loss)]
    return policy, *more


def require_no_critic_options(
    baseline: Baseline, critic: CriticOptions, value_loss: ValueLossOptions, gae: GaeOptions
) -> None:
    """Refuse options of a critic where there is none."""
    given = {
        "critic": critic != DEFAULT_CRITIC,
        "value_loss": value_loss != DEFAULT_VALUE_LOSS,
        "gae.lambda_value": gae.lambda_value != PAPERS_GAE.lambda_value,
        "gae.truncated": gae.truncated != PAPERS_GAE.truncated,
    }
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None:
        raise UserError(f"{name} is given, and baseline = {baseline} goes without a critic.  Leave one of them out.")


def require_adaptable(kl: KlTerm | None, adaptive_kl: AdaptiveKl | None) -> None:
    """Refuse a controller of a KL that is not in the reward."""
    if adaptive_kl is not None and (kl is None or kl.place != "reward" or kl.estimator != "k1"):
        raise UserError(
            "adaptive_kl moves the coefficient of a KL in the reward whose tokens add up to that of the completion:"
            " give kl: {coefficient: .05, estimator: k1, place: reward} as well."
        )


def actor_critic_credit(
    evidence: Evidence,
    *,
    gae: GaeOptions,
    baseline: Baseline,
    whitening: Whitening,
    missing_stop: MissingStop,
    value_clip: float | None,
) -> Credit:
    """Advantages and returns of every token, from rewards, token rewards and values.

    The reward of a completion is earned by its last token.  A completion that nothing scored has advantages
    and returns of 0, which no token weight lets in.
    """
    rollout = evidence.rollout
    counted = ~evidence.rewards.isnan().flatten()[rollout]
    tokens = valued_tokens(evidence, baseline, missing_stop)
    if gae.truncated == "terminal":
        tokens = replace(tokens, final_values=torch.zeros_like(tokens.final_values))
    advantages, returns = estimated(tokens, gae, evidence.lengths.flatten())
    advantages = torch.where(counted, advantages, 0.0)
    by = None
    if whitening != "none":
        by = whitening_of(advantages, counted, centre=whitening == "mean_and_deviation")
        advantages = whitened(advantages, counted, by)
    if baseline != "critic":
        return Credit(advantages, whitening=by)
    returns = torch.where(counted, returns, 0.0)
    return Credit(advantages, returns, value_range(returns, counted, value_clip), by)


def estimated(
    tokens: ValuedTokens, gae: GaeOptions, lengths: Tensor
) -> tuple[Float64[Tensor, " token"], Float64[Tensor, " token"]]:
    """Advantages of the policy and targets of the values, each with its own λ."""
    if gae.estimator == "one_step":
        return one_step_advantages(tokens, gamma=gae.gamma), value_targets(tokens, gamma=gae.gamma, lam=0.0)
    lam: float | Tensor = gae.lambda_policy
    if gae.length_adaptive is not None:
        lam = adaptive_lambda(lengths, alpha=gae.length_adaptive)
    return (
        generalised_advantages(tokens, gamma=gae.gamma, lam=lam),
        value_targets(tokens, gamma=gae.gamma, lam=gae.lambda_value),
    )


def valued_tokens(evidence: Evidence, baseline: Baseline, missing_stop: MissingStop) -> ValuedTokens:
    """The evidence token by token; what nothing scored earns 0."""
    rollout, rewards = evidence.rollout, evidence.rewards
    if missing_stop.acts:
        assert evidence.truncated is not None, "nobody says which completions were cut off"
        rewards = rewards_with_missing_stops(rewards, evidence.truncated, missing_stop=missing_stop)
    earned = rewards_of_tokens(evidence, rewards)
    return ValuedTokens(
        rewards=earned,
        values=values_of(evidence, earned, baseline),
        rollout=rollout,
        final_values=(evidence.final_values if baseline == "critic" else torch.zeros_like(rewards)).flatten(),
    )


def rewards_of_tokens(evidence: Evidence, rewards: Float64[Tensor, "prompt group"]) -> Float64[Tensor, " token"]:
    """What each token earned: its own reward, and the last one the completion's too."""
    lengths, own = evidence.lengths.flatten(), evidence.token_rewards
    if own is None:
        own = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    return own.index_add(0, lengths.cumsum(0) - 1, rewards.flatten().nan_to_num(nan=0.0))


def values_of(evidence: Evidence, earned: Float64[Tensor, " token"], baseline: Baseline) -> Float64[Tensor, " token"]:
    """What was expected before each token: by the critic, as the mean of the prompt's other completions, or nothing."""
    if baseline == "critic":
        return evidence.values
    if baseline == "none":
        return torch.zeros_like(earned)
    totals = torch.zeros(evidence.lengths.numel(), dtype=torch.float64).index_add(0, evidence.rollout, earned)
    totals = torch.where(evidence.rewards.isnan(), torch.nan, totals.view(evidence.rewards.shape))
    others = torch.where(totals.isnan(), 0.0, totals - leave_one_out(totals))
    return others.flatten()[evidence.rollout]


def value_range(
    returns: Float64[Tensor, " token"], counted: Bool[Tensor, " token"], clip: float | None
) -> Float64[Tensor, " token"] | None:
    """`clip` deviations of the step's returns, for every token; None where values are not clipped.

    Returns that are all alike have no deviation to measure in, and values then move freely.
    """
    if clip is None or not bool(counted.any()):
        return None
    deviation = returns[counted].std(correction=0)
    differs = deviation >= LEAST_DEVIATION
    reach = clip * deviation if differs else torch.tensor(torch.finfo(returns.dtype).max, dtype=returns.dtype)
    return reach.expand(len(returns)).clone()
