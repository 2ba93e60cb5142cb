"""Importance weights for samples of another policy than the one that a step starts from: older weights, another engine.

With π_prox the policy at the start of the step, μ the one that sampled and w a bounded estimate of π_prox/μ, a token's
loss is w L, and the ratio in L is π/π_prox.  What an update does to the policy and what is wrong with its samples are
then two numbers: the first is clipped by the surrogate, the second truncated or masked here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.losses import RatioLevel, log_ratio
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.errors import UserError
from posttrain.needs import Need

TRUNCATE = 2.0
MASK_LEVEL: RatioLevel = "sequence_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What becomes of samples whose log-probs are not those of the policy that the step starts from."""

    level: RatioLevel | None = "token"
    """What weighs a token's loss: π_prox/μ of the token (token), or of its completion, the geometric mean over tokens
    (sequence_mean) or the product (sequence_product).  Null weighs nothing, so that only the mask acts."""
    truncate: float | None = TRUNCATE
    """Largest weight, C: min(π_prox/μ, C).  Null leaves weights as they are, unbiased and of any size."""
    mask_low: float | None = None
    """Least π_prox/μ, at `mask_level`, of what is trained on; null is no such bound."""
    mask_high: float | None = None
    """Largest; null is no such bound."""
    mask_level: RatioLevel = MASK_LEVEL
    """token leaves single tokens out, the others whole completions."""

    def __post_init__(self) -> None:
        if self.truncate is not None and not 1 <= self.truncate < math.inf:
            raise UserError(
                f"truncate = {self.truncate}: the largest weight, and where nothing is wrong weights are 1; use 1 or"
                " more, or null for no bound."
            )
        low, high = self.mask_low, self.mask_high
        if low is not None and not 0 <= low <= 1:
            raise UserError(f"mask_low = {low}: the least ratio, and 1 must pass; use 0 to 1, or null for no bound.")
        if high is not None and not 1 <= high < math.inf:
            raise UserError(f"mask_high = {high}: the largest ratio, and 1 must pass; use 1 or more, or null.")
        if self.level is None and low is None and high is None:
            raise UserError(
                "level = null weighs nothing, and without mask_low or mask_high nothing is masked: write"
                " `correction: null`, or give one of them."
            )
        if self.level is None and self.truncate not in (TRUNCATE, None):
            raise UserError(f"truncate = {self.truncate} with level = null: nothing is weighed.  Leave truncate out.")
        if self.mask_level != MASK_LEVEL and low is None and high is None:
            raise UserError(
                f"mask_level = {self.mask_level} without mask_low or mask_high: nothing is masked.  Give a bound, or"
                " leave mask_level out."
            )


class Corrected(NamedTuple):
    """What a correction makes of the tokens of some completions."""

    weights: Float[Tensor, " token"]
    """What multiplies the loss of each token; 0 where it is masked."""
    truncated: Bool[Tensor, " token"]
    """Tokens whose weight the bound holds back, and which no mask leaves out."""
    masked: Bool[Tensor, " token"]


def correction_weights(
    proximal_logprobs: Float[Tensor, " token"],
    behaviour_logprobs: Float[Tensor, " token"],
    rollout: Int64[Tensor, " token"],
    *,
    correction: Correction,
) -> Corrected:
    """How much each token counts, as a sample of μ that is to stand for π_prox (dimensionless, without gradient).

        w = min(π_prox/μ, C)                            Ionides 2008; Yao et al. 2025 (TIS)
        w = 0 where π_prox/μ is outside [low, high]     of the token (IcePop) or of its completion (MIS)

    Exactly 1 where π_prox = μ.  Without bounds and with `sequence_product` the mean of w f is that of f under π_prox,
    for any f of the completion; the other levels leave out how earlier tokens came about.  What is masked stays in the
    divisors of token weights, so that the others do not come to weigh more.
    """

    def log_weight(level: RatioLevel) -> Tensor:
        return log_ratio(proximal_logprobs.detach(), behaviour_logprobs, rollout, level=level)

    by_mask = log_weight(correction.mask_level)
    low = -math.inf if not correction.mask_low else math.log(correction.mask_low)
    high = math.inf if correction.mask_high is None else math.log(correction.mask_high)
    masked = (by_mask < low) | (by_mask > high)
    bound = math.inf if correction.truncate is None else math.log(correction.truncate)
    own = torch.zeros_like(by_mask) if correction.level is None else log_weight(correction.level)
    truncated = (own > bound) & ~masked
    # Bounded before exp: beyond any number, 0 · inf would be none.
    weights = torch.where(masked, -math.inf, own.clamp(max=bound)).exp()
    return Corrected(weights, truncated, masked)


def corrected(term: LossTerm, correction: Correction | None) -> LossTerm:
    """The term for samples of an older policy: weighed by π_prox/μ, and π/π_prox in place of its ratio π/μ.

    As it is without a correction.
    """
    if correction is None:
        return term

    def of(view: TokenView) -> Corrected:
        columns = view.columns
        return correction_weights(
            columns.proximal_logprobs, columns.behaviour_logprobs, view.rollout, correction=correction
        )

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        return of(view).weights * term.per_token(since_the_step_began(view))

    def clipped(view: TokenView) -> Bool[Tensor, " token"]:
        assert term.clipped is not None
        return term.clipped(since_the_step_began(view))

    def measures(view: TokenView) -> Mapping[str, Tensor]:
        weights, truncated, masked = of(view)
        return {
            **({} if term.measures is None else term.measures(view)),
            "correction/weight": weights,
            "correction/truncated": truncated.double(),
            "correction/masked": masked.double(),
        }

    return replace(
        term,
        per_token=per_token,
        needs=term.needs | {Need.PROXIMAL_LOGPROBS},
        clipped=None if term.clipped is None else clipped,
        measures=measures,
    )


def since_the_step_began(view: TokenView) -> TokenView:
    """The tokens as though the policy that the step starts from had sampled them."""
    return replace(view, columns=replace(view.columns, behaviour_logprobs=view.columns.proximal_logprobs))
