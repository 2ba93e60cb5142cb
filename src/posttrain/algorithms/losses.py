"""Policy-gradient losses, one value per token, lower is better; token weights add them up to the loss of an update.

Tokens of all completions are concatenated; `rollout` says which completion each belongs to.  A completion is
never split between two calls, since a sequence ratio needs all of its tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from jaxtyping import Bool, Float, Float64, Int64
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
    """Largest ρ of a token with a negative advantage, which neither bound limits; infinity means no limit."""

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
    # Each completion's place among the sorted numbers: to count the completions, the CPU would wait for a GPU.
    place = torch.searchsorted(rollout.sort().values, rollout)
    total = torch.zeros_like(own).index_add(0, place, own)
    if level == "sequence_mean":
        lengths = torch.zeros_like(place).index_add(0, place, torch.ones_like(place))
        total = total / lengths.clamp(min=1)
    return total[place]


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
    that direction only `dual` bounds ρ: with A < 0 and ρ → ∞ the loss grows without limit, or up to -dual · A
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
    tokens that `dual` bounds are not counted.
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


Weighting = Literal["mean_over_tokens", "mean_over_sequences", "sum_over_sequence", "constant_length"]


def mean_over_tokens(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """Every token of the update counts alike; the weights of all tokens sum to 1.

    w_i = 1 / Σ_k |y_k|        Yu et al. 2025 (DAPO), arXiv:2503.14476
    """
    return _shares(scored, torch.where(scored, lengths, 0).sum())


def mean_over_sequences(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """Every completion counts alike and shares its weight among its tokens; the weights of all tokens sum to 1.

        w_i = 1 / (R |y_i|)        Shao et al. 2024 (GRPO), arXiv:2402.03300

    A token of a short completion weighs more than one of a long completion.
    """
    return _shares(scored, scored.sum() * lengths)


def sum_over_sequence(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """The policy gradient of the expected reward: log π(y) is a sum over tokens, averaged over completions.

        w_i = 1 / R        Williams 1992; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740

    The weights of all tokens sum to the mean length, so the gradient grows with the completions.
    """
    return _shares(scored, scored.sum())


def constant_length(
    lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
) -> Float64[Tensor, " rollout"]:
    """`sum_over_sequence` in units of the length limit: no preference for any length, at a gradient of usual size.

    w_i = 1 / (R · max_completion_tokens)        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783
    """
    return _shares(scored, scored.sum() * max_completion_tokens)


def _shares(scored: Bool[Tensor, " rollout"], divisor: Tensor) -> Float64[Tensor, " rollout"]:
    """1 / divisor for the scored rollouts, 0 for the others and where the divisor is 0, since nothing is counted."""
    return torch.where(scored & (divisor > 0), 1 / divisor.double(), 0.0)


WEIGHTINGS: Mapping[Weighting, Callable[..., Tensor]] = {
    "mean_over_tokens": mean_over_tokens,
    "mean_over_sequences": mean_over_sequences,
    "sum_over_sequence": sum_over_sequence,
    "constant_length": constant_length,
}
"""The rules by the names that recipes give them."""
