"""What a value head learns by, and the bonus for staying uncertain: loss terms of actor-critic methods."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.errors import UserError
from posttrain.needs import Need


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossOptions:
    """How the value head is drawn to the returns."""

    coefficient: float = 1.0
    """Of ½ (V - R)²; 1 is the weight .5 of the squared error that courses have.  AdamW does not see the scale of a
    gradient, so this matters to a shared trunk and to the head's clipping alone."""
    clip: float | None = None
    """How far a value may move in a step, in deviations of the step's returns; null lets it.  Libraries have .2, in
    units of reward."""

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise UserError(f"coefficient = {self.coefficient}: the values would not be learned; use more than 0.")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip = {self.clip}: no value could move; use a number above 0, or null.")


DEFAULT_VALUE_LOSS = ValueLossOptions()
"""Half the squared error, unclipped."""


def value_loss(
    values: Float[Tensor, " token"],
    returns: Float[Tensor, " token"],
    *,
    earlier: Float[Tensor, " token"] | None = None,
    reach: Float[Tensor, " token"] | None = None,
) -> Float[Tensor, " token"]:
    """Half the squared error, in squared units of reward; with a reach the larger of two, as PPO's code has it.

        L = ½ max((V - R)², (V_c - R)²),   V_c = V' + clip(V - V', -reach, reach)        V': the value at collection

    The maximum has no gradient where V is beyond the reach and nearer to R than V_c is: it has gone far enough.
    Schulman et al. 2017's code; Huang et al. 2022 ("The 37 implementation details of PPO") and Engstrom et al. 2020,
    arXiv:2005.12729, find no use in it, so that without a reach the loss is ½ (V - R)².
    """
    error = (values - returns).square()
    if reach is None:
        return error / 2
    assert earlier is not None, "values are clipped around those at collection"
    return torch.maximum(error, (within_reach(values, earlier, reach) - returns).square()) / 2


def within_reach(values: Tensor, earlier: Tensor, reach: Tensor) -> Float[Tensor, " token"]:
    """V' + clip(V - V', -reach, reach)."""
    return earlier + torch.maximum(torch.minimum(values - earlier, reach), -reach)


def value_term(options: ValueLossOptions) -> LossTerm:
    """The value loss of every token, with the tokens on which its clip acts as a metric."""

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        reach = view.columns.value_range
        earlier = None if reach is None else view.columns.values
        return value_loss(view.values, view.columns.returns, earlier=earlier, reach=reach)

    def held(view: TokenView) -> dict[str, Float[Tensor, " token"]]:
        return {
            "value/clip_fraction": (per_token(view) > value_loss(view.values, view.columns.returns)).to(view.values)
        }

    return LossTerm(
        name="value",
        per_token=per_token,
        coefficient=options.coefficient,
        needs=frozenset({Need.VALUES}),
        metric="value/loss",
        measures=None if options.clip is None else held,
    )


def entropy_term(coefficient: float) -> LossTerm:
    """A bonus for the entropy of the next-token distribution, per token: the loss is less by c · H, H in nats.

    Raises UserError for a negative c.
    """
    if not coefficient >= 0:
        raise UserError(f"entropy_bonus = {coefficient}: is negative; use 0 or more.")

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        return -view.entropies

    return LossTerm(
        name="entropy_bonus",
        per_token=per_token,
        coefficient=coefficient,
        needs=frozenset({Need.ENTROPY}),
        reported=False,  # `entropy` is
    )
