"""PPO with a value head: the row of the table, its credit rule, and generalised advantage estimation (GAE).

Sampled tokens of all completions are concatenated; `rollout` says which completion each belongs to.  A token is an
action and the text before it a state.  V_t is the expected return before token t, and r_t the token's reward.  Tokens
that were given between two sampled ones are part of the later one's state, so γλ counts once per sampled token.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posttrain.algorithms import terms
from posttrain.algorithms.advantages import LEAST_DEVIATION, RewardScaling, leave_one_out, rewards_with_missing_stops
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.correction import Correction, corrected
from posttrain.algorithms.credit import UNWHITENED, Credit, Evidence, Whitening
from posttrain.algorithms.kl import AdaptiveKl
from posttrain.algorithms.losses import WEIGHTINGS, ClipRange, NonNegative, Weighting, clipped_surrogate
from posttrain.algorithms.terms import DEFAULT_VALUE_LOSS, KlTerm, ValueLossOptions
from posttrain.errors import UserError
from posttrain.needs import Need
from posttrain.options.algorithm import DEFAULT_CRITIC, CriticOptions
from posttrain.options.bounds import Bounded, NonNegativeFloat, Share, Unused, refuse_unread, within_bounds
from posttrain.options.training import Passes


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeOptions(Bounded):
    """How advantages and value targets are computed from rewards and values."""

    estimator: Literal["gae", "one_step"] = "gae"
    """gae: sums of all later surprises, each discounted by γλ.  one_step: the next value in place of later rewards (a
    course's rule); the λ below are then unused."""
    gamma: Share = 1.0
    """Discount of a reward per later token; 1 means no discount."""
    lambda_policy: Share = 0.95
    """λ of the policy's advantages: 1 is the whole return (no bias), 0 only the next value (least variance)."""
    lambda_value: Share = 1.0
    """λ of the value's targets; 1 is the earned return (Yuan et al. 2025, VC-PPO, arXiv:2503.01491)."""
    length_adaptive: Annotated[float, Gt(0)] | None = None
    """α: λ of the policy is 1 - 1/(α · length) for each completion, so that long ones see their ends (VAPO, Yue et al.
    2025, arXiv:2504.05118, has .05).  Null: `lambda_policy` for all."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """The value after a completion that was cut off at its limit: 0, or the critic's."""

    rules = (Unused("length_adaptive", {"estimator": "gae"}),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedTokens:
    """Tokens of some completions, with the reward of each and the value before it."""

    rewards: Float[Tensor, " token"]
    values: Float[Tensor, " token"]
    rollout: Int64[Tensor, " token"]
    """Which completion each token belongs to: 0, 0, ..., 1, 1, ..."""
    final_values: Float[Tensor, " rollout"]
    """The expected value after the last token; 0 where the completion ended there."""

    @property
    def is_last(self) -> Bool[Tensor, " token"]:
        last = torch.ones_like(self.rollout, dtype=torch.bool)
        last[:-1] = self.rollout[1:] != self.rollout[:-1]
        return last

    @property
    def next_values(self) -> Float[Tensor, " token"]:
        return torch.where(self.is_last, self.final_values[self.rollout], self.values.roll(-1))


def one_step_advantages(tokens: ValuedTokens, *, gamma: float = 1.0) -> Float[Tensor, " token"]:
    """A token's reward and the next value, above the value before it.

        A_t = Q_t - V_t,   Q_t = r_t + γ V_{t+1};   for the last token Q = r

    With γ = 1 and without token rewards it is the rule that courses on RLHF teach.  It has the least variance, and the
    full bias of the values.
    """
    return tokens.rewards + gamma * tokens.next_values - tokens.values


def generalised_advantages(
    tokens: ValuedTokens, *, gamma: float = 1.0, lam: float | Float[Tensor, " rollout"] = 0.95
) -> Float[Tensor, " token"]:
    """GAE: all later surprises δ, each counting γλ times as much as the one before.

        δ_t = r_t + γ V_{t+1} - V_t
        A_t = Σ_k (γλ)^k δ_{t+k} = δ_t + γλ A_{t+1}        arXiv:1506.02438, eq. 16

    λ = 1 is the return above V_t, λ = 0 is δ_t.  `lam` may differ from completion to completion.
    """
    surprises = one_step_advantages(tokens, gamma=gamma)
    of_rollout = torch.as_tensor(lam, dtype=surprises.dtype).expand(len(tokens.final_values))
    carried = torch.where(tokens.is_last, 0.0, gamma * of_rollout[tokens.rollout])
    return discounted_sums(surprises, carried)


def value_targets(
    tokens: ValuedTokens, *, gamma: float = 1.0, lam: float | Float[Tensor, " rollout"] = 1.0
) -> Float[Tensor, " token"]:
    """TD(λ) returns: the value targets before each token.

        R_t = A_t + V_t        of advantages as they come, never of whitened ones

    λ = 1 is the return earned from there on (Monte Carlo), whatever the values were.
    """
    return generalised_advantages(tokens, gamma=gamma, lam=lam) + tokens.values


def discounted_sums(terms: Float[Tensor, " token"], carried: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """x_t = terms_t + carried_t · x_{t+1}, for all tokens at once; `carried` is 0 where nothing follows.

    By doubling: after k rounds x_t has the terms of 2^k tokens, so as many rounds as the longest completion has bits.
    """
    total, factor, reach = terms, carried, 1
    while reach < len(terms) and bool((factor != 0).any()):
        total = total + factor * _shifted(total, reach)
        factor = factor * _shifted(factor, reach)
        reach *= 2
    return total


def adaptive_lambda(lengths: Int64[Tensor, " rollout"], *, alpha: float) -> Float[Tensor, " rollout"]:
    """λ for which the weights of the surprises, 1/(1 - λ) in sum, are a share α of the completion's length.

    λ = max(0, 1 - 1/(α · length))        Yue et al. 2025 (VAPO), arXiv:2504.05118
    """
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def whitening_of(
    advantages: Float[Tensor, " token"], counted: Bool[Tensor, " token"], *, centre: bool = True
) -> Whitening:
    """Mean and deviation of the advantages of the counted tokens of the step; the mean is 0 with `centre` off.

    The deviation divides by the number of tokens.  If it is below 1e-6, advantages are not changed: they differ only by
    rounding.
    """
    if not bool(counted.any()):
        return UNWHITENED
    mean = torch.where(counted, advantages, 0.0).sum() / counted.sum()
    deviation = torch.where(counted, advantages - mean, 0.0).square().sum().div(counted.sum()).sqrt()
    if deviation < LEAST_DEVIATION:
        return UNWHITENED
    return Whitening(shift=mean.item() if centre else 0.0, scale=deviation.item())


def whitened(
    advantages: Float[Tensor, " token"], counted: Bool[Tensor, " token"], whitening: Whitening
) -> Float[Tensor, " token"]:
    """Advantages in units of their deviation over the step; those of tokens that do not count are 0.

    (A_t - mean A) / std A,  or  A_t / std A
    """
    return torch.where(counted, (advantages - whitening.shift) / whitening.scale, 0.0)


def _shifted(column: Tensor, by: int) -> Tensor:
    """x_{t+by}, and 0 beyond the end."""
    return torch.cat([column[by:], column.new_zeros(by)])


Baseline = Literal["critic", "leave_one_out", "none"]
Whiten = Literal["mean_and_deviation", "deviation", "none"]

LARGEST_RATIO = math.exp(20.0)
"""Largest ratio of a token with a negative advantage, which the clip does not bound: larger ones would overflow
soon."""
PAPERS_GAE = GaeOptions()


@within_bounds
def ppo(
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: float | None = None,
    gae: GaeOptions = PAPERS_GAE,
    baseline: Baseline = "critic",
    critic: CriticOptions = DEFAULT_CRITIC,
    value_loss: ValueLossOptions = DEFAULT_VALUE_LOSS,
    whitening: Whiten = "mean_and_deviation",
    entropy_bonus: NonNegativeFloat = 0.0,
    missing_stop_penalty: NonNegativeFloat = 0.0,
    missing_stop_cap: bool = False,
    reward_scaling: RewardScaling | None = None,
    token_weights: Weighting = "mean_over_tokens",
    correction: Correction | None = None,
    kl: KlTerm | None = None,
    adaptive_kl: AdaptiveKl | None = None,
    largest_epoch_kl: Annotated[float, Gt(0)] | None = 0.02,
) -> Algorithm:
    """Schulman et al. 2017, arXiv:1707.06347, for language models: a value for every token, GAE, a clipped surrogate.

    Rewards are compared with the `baseline`: a critic's values, the other completions of the prompt, or nothing.
    `missing_stop_penalty` is subtracted from the reward of a completion that was cut off; with `missing_stop_cap` that
    reward is at most the least of the step's completions that stopped.  `largest_epoch_kl`, in nats per token, is the
    KL to the sampling policy beyond which a step makes no further update.
    """
    has_critic, in_loss = baseline == "critic", kl is not None and kl.place == "loss"
    if not has_critic:
        refuse_critic_options(critic, value_loss, gae)
    require_k1_in_reward(kl, adaptive_kl)
    dual = max(LARGEST_RATIO, 1 + clip_high) if dual_clip is None else dual_clip
    policy = terms.policy_term(clipped_surrogate, clip=ClipRange(low=clip_low, high=clip_high, dual=dual))
    return Algorithm(
        name="ppo",
        credit=partial(
            actor_critic_credit,
            gae=gae,
            baseline=baseline,
            whitening=whitening,
            missing_stop=(missing_stop_penalty, missing_stop_cap),
            value_clip=value_loss.clip if has_critic else None,
        ),
        terms=(
            corrected(policy, correction),
            *([terms.kl_term(kl)] if kl is not None and in_loss else []),
            *([terms.entropy_term(entropy_bonus)] if entropy_bonus else []),
            *([terms.value_term(value_loss)] if has_critic else []),
        ),
        token_weights=WEIGHTINGS[token_weights],
        kl_penalty=None if in_loss else kl,
        credits_turns=reward_scaling is None and not missing_stop_cap,
        least_group_size=2 if baseline == "leave_one_out" else 1,
        critic=critic if has_critic else None,
        credit_needs=frozenset({Need.VALUES}) if has_critic else frozenset(),
        adaptive_kl=adaptive_kl,
        reward_scaling=reward_scaling,
        passes=Passes(epochs=2, minibatches=4),
        largest_epoch_kl=largest_epoch_kl,
    )


def require_k1_in_reward(kl: KlTerm | None, adaptive_kl: AdaptiveKl | None) -> None:
    if adaptive_kl is not None and (kl is None or kl.place != "reward" or kl.estimator != "k1"):
        raise UserError("adaptive_kl needs a KL in the reward: kl: {coefficient: .05, estimator: k1, place: reward}.")


def refuse_critic_options(critic: CriticOptions, value_loss: ValueLossOptions, gae: GaeOptions) -> None:
    given = {
        "critic": critic != DEFAULT_CRITIC,
        "value_loss": value_loss != DEFAULT_VALUE_LOSS,
        "gae.lambda_value": gae.lambda_value != PAPERS_GAE.lambda_value,
        "gae.truncated": gae.truncated != PAPERS_GAE.truncated,
    }
    refuse_unread("baseline = critic", given)


def actor_critic_credit(
    evidence: Evidence,
    *,
    gae: GaeOptions,
    baseline: Baseline,
    whitening: Whiten,
    missing_stop: tuple[float, bool],
    value_clip: float | None,
) -> Credit:
    """Advantages and returns of every token, from rewards, token rewards and values.

    The reward of a completion is earned by its last token.  `missing_stop` is (penalty, cap).  A completion without a
    score has advantages and returns of 0, which no token weight lets in.
    """
    rollout, rewards = evidence.rollout, evidence.rewards
    counted = ~rewards.isnan().flatten()[rollout]
    if any(missing_stop):
        assert evidence.truncated is not None, "unknown which completions were cut off"
        penalty, cap = missing_stop
        rewards = rewards_with_missing_stops(rewards, evidence.truncated, penalty=penalty, cap=cap)
    earned = evidence.token_rewards
    if earned is None:
        earned = torch.zeros(len(rollout), dtype=torch.float64)
    ends, begun = evidence.lengths.flatten().cumsum(0) - 1, evidence.lengths.flatten() > 0
    earned = earned.index_add(0, ends[begun], rewards.flatten().nan_to_num(nan=0.0)[begun])
    bootstrapped = baseline == "critic" and gae.truncated == "bootstrap"
    tokens = ValuedTokens(
        rewards=earned,
        values=values_of(evidence, earned, baseline),
        rollout=rollout,
        final_values=(evidence.final_values if bootstrapped else torch.zeros_like(rewards)).flatten(),
    )
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


def values_of(evidence: Evidence, earned: Float64[Tensor, " token"], baseline: Baseline) -> Float64[Tensor, " token"]:
    """The expectation before each token: the critic's value, the mean of the prompt's other completions, or 0."""
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
    """`clip` deviations of the step's returns, for every token; None if values are not clipped.

    Where all returns are equal the deviation is 0, and values then move freely.
    """
    if clip is None or not bool(counted.any()):
        return None
    deviation = returns[counted].std(correction=0)
    differs = deviation >= LEAST_DEVIATION
    reach = clip * deviation if differs else torch.tensor(torch.finfo(returns.dtype).max, dtype=returns.dtype)
    return reach.expand(len(returns)).clone()
