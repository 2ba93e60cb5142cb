"""Policy-gradient losses, one value per token, lower is better; token weights add them up to the loss of an update.

Tokens of all completions lie one after the other; `rollout` says which completion each belongs to.  A completion is
never split between two calls, since a sequence ratio needs all of its tokens.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, Share

NonNegative = Annotated[float, Ge(0)]
"""Infinity is allowed."""
RatioLevel = Literal["token", "sequence_mean", "sequence_product"]


@dataclass(frozen=True, kw_only=True)
class ClipRange(Bounded):
    """How far the ratio ρ = π/μ may move before clipping acts: 1 - low .. 1 + high."""

    low: Share
    """0 allows no decrease; 1 means no lower bound, since ρ is never negative."""
    high: NonNegative
    """0 allows no increase; infinity means no upper bound."""
    dual: float = math.inf
    """Largest ρ of a token with a negative advantage, which neither bound holds back; infinity means none."""

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if not self.dual >= 1 + self.high:
            raise UserError(f"dual_clip = {self.dual}: must be at least 1 + clip_high = {1 + self.high:g}, or null")

    @property
    def log_lowest(self) -> float:
        """Smallest log ρ inside the range, in nats."""
        return math.log1p(-self.low) if self.low < 1 else -math.inf

    @property
    def log_highest(self) -> float:
        """Largest log ρ inside the range, in nats."""
        return math.log1p(self.high)

    @property
    def log_dual(self) -> float:
        """Largest log ρ where the advantage is negative, in nats."""
        return math.log(self.dual)


UNBOUNDED = ClipRange(low=1.0, high=math.inf)
"""Every ratio is inside: no clipping."""


def log_ratio(
    logprobs: Float[Tensor, " token"],
    behaviour_logprobs: Float[Tensor, " token"],
    rollout: Int64[Tensor, " token"],
    *,
    level: RatioLevel = "token",
) -> Float[Tensor, " token"]:
    """log ρ of every token, in nats: its own, or one that all tokens of its completion share.

    token             log π(y_t) - log μ(y_t)
    sequence_mean     (1/|y|) Σ_t (log π(y_t) - log μ(y_t))      Zheng et al. 2025 (GSPO), arXiv:2507.18071
    sequence_product  Σ_t (log π(y_t) - log μ(y_t))              the importance weight of the completion
    """
    own = logprobs - behaviour_logprobs
    if level == "token":
        return own
    lengths = rollout.bincount()
    total = own.new_zeros(len(lengths)).index_add(0, rollout, own)
    if level == "sequence_mean":
        total = total / lengths
    return total[rollout]


def clipped_surrogate(
    logprobs: Float[Tensor, " token"],
    behaviour_logprobs: Float[Tensor, " token"],
    advantages: Float[Tensor, " token"],
    rollout: Int64[Tensor, " token"],
    *,
    clip: ClipRange,
    level: RatioLevel = "token",
) -> Float[Tensor, " token"]:
    """PPO's pessimistic surrogate.

        L = -min(ρ A, clip(ρ, 1 - low, 1 + high) A)

    Schulman et al. 2017, arXiv:1707.06347; unequal bounds are DAPO's clip-higher, arXiv:2503.14476; a sequence level
    makes it GSPO, arXiv:2507.18071.  No gradient once ρ has left the range in the direction that A favours.  Against
    that direction nothing bounds ρ but `dual`: with A < 0 and ρ → ∞ the loss grows without limit, or up to -dual · A
    (dual-clip PPO, Ye et al. 2020, arXiv:1912.09729; TRL's delta), with no gradient from there on.
    """
    # The minimum is ρ from above for A ≥ 0 and ρ from below for A < 0.  Bounding log ρ rather than comparing the two
    # products keeps exp finite where the bound holds: 0 · inf in its backward pass would be NaN.
    inf, unwanted = torch.full_like(advantages, math.inf), advantages < 0
    lowest = torch.where(unwanted, clip.log_lowest, -inf)
    highest = torch.where(unwanted, inf.clamp(max=clip.log_dual), clip.log_highest)
    bounded = log_ratio(logprobs, behaviour_logprobs, rollout, level=level).clamp(lowest, highest)
    return -bounded.exp() * advantages


def weighted_policy_gradient(
    logprobs: Float[Tensor, " token"],
    behaviour_logprobs: Float[Tensor, " token"],
    advantages: Float[Tensor, " token"],
    rollout: Int64[Tensor, " token"],
    *,
    clip: ClipRange = UNBOUNDED,
    level: RatioLevel = "token",
) -> Float[Tensor, " token"]:
    """The score-function loss under a bounded importance weight without a gradient.

        L = -sg[clip(ρ, 1 - low, 1 + high)] A log π        MiniMax 2025 (CISPO), arXiv:2506.13585

    Every token keeps a gradient, however far ρ has moved.  Unbounded it is REINFORCE (Williams 1992), corrected for
    samples from an older policy; on policy ρ = 1 and L = -A log π.
    """
    ratio = log_ratio(logprobs, behaviour_logprobs, rollout, level=level)
    weight = ratio.clamp(clip.log_lowest, clip.log_highest).exp().detach()
    return -weight * advantages * logprobs


def clipped_tokens(
    log_ratio: Float[Tensor, " token"], advantages: Float[Tensor, " token"], *, clip: ClipRange
) -> Bool[Tensor, " token"]:
    """Tokens whose ratio has left the range in the direction that their advantage favours.

    Under `clipped_surrogate` these have no gradient.  Where A > 0 the upper bound was passed, where A < 0 the lower;
    what `dual` holds back is not counted.
    """
    above, below = log_ratio > clip.log_highest, log_ratio < clip.log_lowest
    return (above & (advantages > 0)) | (below & (advantages < 0))


@dataclass(frozen=True, kw_only=True)
class RatioStatistics:
    """How far the policy has moved from the one that its tokens were sampled from; over all tokens of an update."""

    num_tokens: int
    total: float
    """Sum of the ratios; their mean is 1 in expectation when tokens come from the denominator's policy."""
    lowest: float
    highest: float
    kl_total: float
    """Sum of ρ - 1 - log ρ; its mean estimates KL(μ‖π) from tokens sampled from μ, in nats per token."""

    @property
    def mean(self) -> float:
        return self.total / self.num_tokens

    @property
    def kl(self) -> float:
        return self.kl_total / self.num_tokens


def ratio_statistics(log_ratio: Float[Tensor, " token"]) -> RatioStatistics:
    """Ratios of one update as sums, so that several are divided once: a mean of means would be another number."""
    ratio = log_ratio.double().exp()
    return RatioStatistics(
        num_tokens=len(ratio),
        total=ratio.sum().item(),
        lowest=ratio.min().item(),
        highest=ratio.max().item(),
        kl_total=(torch.expm1(log_ratio.double()) - log_ratio.double()).sum().item(),
    )
