"""Importance weights for samples of another policy than the one that a step starts from: older weights, another engine.

With π_prox the policy at the start of the step, μ the one that sampled and w a bounded estimate of π_prox/μ, a token's
loss is w L, and the ratio in L is π/π_prox.  The change by the update and the error of the samples are then two
numbers: the surrogate clips the first, and the second is truncated or masked here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Lt
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.losses import RatioLevel, log_ratio
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.needs import Need
from posttrain.options.bounds import Bounded, Rule, Share

TRUNCATE = 2.0
MASK_LEVEL: RatioLevel = "sequence_mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction(Bounded):
    """Weights and masks for samples whose log-probs are not those of the policy that the step starts from."""

    level: RatioLevel | None = "token"
    """The weight of a token's loss: π_prox/μ of the token (token), or of its completion, the geometric mean over tokens
    (sequence_mean) or the product (sequence_product).  Null for no weights, only the mask."""
    truncate: Annotated[float, Ge(1), Lt(math.inf)] | None = TRUNCATE
    """Largest weight, C: min(π_prox/μ, C).  Null for no bound: unbiased weights of any size."""
    mask_low: Share | None = None
    """Least π_prox/μ, at `mask_level`, of what is trained on; null for no bound."""
    mask_high: Annotated[float, Ge(1), Lt(math.inf)] | None = None
    """Largest π_prox/μ, at `mask_level`; null for no bound."""
    mask_level: RatioLevel = MASK_LEVEL
    """token leaves single tokens out, the others whole completions."""

    rules = (
        Rule("level", lambda o: o.level or o.masks, "needs mask_low or mask_high, or write `correction: null`."),
        Rule("truncate", lambda o: o.level or o.truncate in (TRUNCATE, None), "needs a level.  Leave it out."),
        Rule("mask_level", lambda o: o.masks or o.mask_level == MASK_LEVEL, "needs mask_low or mask_high."),
    )

    @property
    def masks(self) -> bool:
        return self.mask_low is not None or self.mask_high is not None


class Corrected(NamedTuple):
    """The weights of the tokens of some completions."""

    weights: Float[Tensor, " token"]
    """The factor of each token's loss; 0 where it is masked."""
    truncated: Bool[Tensor, " token"]
    """Tokens that are not masked and whose weight is above the bound."""
    masked: Bool[Tensor, " token"]


def correction_weights(
    proximal_logprobs: Float[Tensor, " token"],
    behaviour_logprobs: Float[Tensor, " token"],
    rollout: Int64[Tensor, " token"],
    *,
    correction: Correction,
) -> Corrected:
    """The weight of each token as a sample of π_prox that μ drew (dimensionless, without gradient).

        w = min(π_prox/μ, C)                            Ionides 2008; Yao et al. 2025 (TIS)
        w = 0 where π_prox/μ is outside [low, high]     of the token (IcePop) or of its completion (MIS)

    Exactly 1 where π_prox = μ.  Without bounds and with `sequence_product` the mean of w f is that of f under π_prox,
    for any f of the completion; the other levels leave out how earlier tokens were drawn.  Masked tokens still count in
    the divisors of token weights, so the others do not weigh more.
    """

    def log_weight(level: RatioLevel) -> Tensor:
        return log_ratio(proximal_logprobs.detach(), behaviour_logprobs, rollout, level=level)

    by_mask = log_weight(correction.mask_level)
    low = -math.inf if not correction.mask_low else math.log(correction.mask_low)
    high = math.inf if correction.mask_high is None else math.log(correction.mask_high)
    masked = (by_mask < low) | (by_mask > high)
    bound = math.inf if correction.truncate is None else math.log(correction.truncate)
    logs = torch.zeros_like(by_mask) if correction.level is None else log_weight(correction.level)
    truncated = (logs > bound) & ~masked
    # Bounded before exp: where exp overflows, 0 · inf would be NaN.
    weights = torch.where(masked, -math.inf, logs.clamp(max=bound)).exp()
    return Corrected(weights, truncated, masked)


def corrected(term: LossTerm, correction: Correction | None) -> LossTerm:
    """The term for samples of an older policy: weighed by π_prox/μ, and π/π_prox in place of its ratio π/μ."""
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
    """The tokens as if the policy that the step starts from had sampled them."""
    return replace(view, columns=replace(view.columns, behaviour_logprobs=view.columns.proximal_logprobs))
