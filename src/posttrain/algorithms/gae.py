"""Advantages and value targets from values: one step ahead, or generalised advantage estimation (GAE).

Sampled tokens of all completions lie one after the other; `rollout` says whose each is.  A token is an action, what
comes before it a state: V_t is what was expected of the completion before token t, r_t what the token earned.  Tokens
that were given between two sampled ones are part of the later one's state, so γλ counts once per sampled token.

Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", arXiv:1506.02438.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.credit import UNWHITENED, Whitening
from posttrain.options.bounds import Bounded, Share, Unused

LEAST_DEVIATION = 1e-6
"""Of rewards, returns and advantages, in units of reward; a smaller one is rounding and nothing is divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeOptions(Bounded):
    """How advantages and value targets are computed from rewards and values."""

    estimator: Literal["gae", "one_step"] = "gae"
    """gae: sums of all later surprises, γλ apart.  one_step: the next value in place of what came (a course's rule);
    the λ below are then unused."""
    gamma: Share = 1.0
    """Discount of a reward per token that it comes later; 1 is none."""
    lambda_policy: Share = 0.95
    """λ of the policy's advantages: 1 is the whole return (no bias), 0 only the next value (least variance)."""
    lambda_value: Share = 1.0
    """λ of the value's targets; 1 is what was earned (Yuan et al. 2025, VC-PPO, arXiv:2503.01491)."""
    length_adaptive: Annotated[float, Gt(0)] | None = None
    """α: λ of the policy is 1 - 1/(α · length) for each completion, so that long ones see their ends (VAPO, Yue et al.
    2025, arXiv:2504.05118, has .05).  Null: `lambda_policy` for all."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """What comes after a completion that was cut off at its limit: nothing, or what the critic expected there."""

    rules = (Unused("length_adaptive", {"estimator": "gae"}),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedTokens:
    """Tokens of some completions, with the reward of each and the value before it."""

    rewards: Float[Tensor, " token"]
    values: Float[Tensor, " token"]
    rollout: Int64[Tensor, " token"]
    """Which completion each token belongs to: 0, 0, ..., 1, 1, ..."""
    final_values: Float[Tensor, " rollout"]
    """What was expected after the last token; 0 where the completion ended there."""

    @property
    def is_last(self) -> Bool[Tensor, " token"]:
        last = torch.ones_like(self.rollout, dtype=torch.bool)
        last[:-1] = self.rollout[1:] != self.rollout[:-1]
        return last

    @property
    def next_values(self) -> Float[Tensor, " token"]:
        return torch.where(self.is_last, self.final_values[self.rollout], self.values.roll(-1))


def one_step_advantages(tokens: ValuedTokens, *, gamma: float = 1.0) -> Float[Tensor, " token"]:
    """What the next value says a token was worth, above what was expected before it.

        A_t = Q_t - V_t,   Q_t = r_t + γ V_{t+1};   for the last token Q = r

    With γ = 1 and without token rewards it is the rule that courses on RLHF teach.  Least variance, and as wrong as the
    values are.
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
    """TD(λ) returns: what should have been expected before each token.

        R_t = A_t + V_t        of advantages as they come, never of whitened ones

    λ = 1 is what was earned from there on (Monte Carlo), whatever the values were.
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

    The deviation divides by the number of tokens.  Where it is below 1e-6 advantages stay as they are: what differs is
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
