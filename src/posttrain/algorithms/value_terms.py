"""What a value head learns by, and the bonus for staying uncertain: loss terms of actor-critic methods."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from jaxtyping import Float
from torch import Tensor

from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.needs import Need
from posttrain.options.bounds import Bounded, PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossOptions(Bounded):
    """How the value head is drawn to the returns."""

    coefficient: PositiveFloat = 1.0
    """Of ½ (V - R)²; 1 is the weight .5 of the squared error that courses have.  AdamW does not see the scale of a
    gradient, so this matters only to a shared trunk and to the head's clipping."""
    clip: Annotated[float, Gt(0)] | None = None
    """How far a value may move in a step, in deviations of the step's returns; null lets it.  Libraries have .2, in
    units of reward."""


DEFAULT_VALUE_LOSS = ValueLossOptions()


def value_loss(
    values: Float[Tensor, " token"],
    returns: Float[Tensor, " token"],
    *,
    earlier: Float[Tensor, " token"] | None = None,
    reach: Float[Tensor, " token"] | None = None,
) -> Float[Tensor, " token"]:
    """Half the squared error, in squared units of reward; with a reach the larger of two, as in PPO's code.

        L = ½ max((V - R)², (V_c - R)²),   V_c = V' + clip(V - V', -reach, reach)        V': the value at collection

    The maximum has no gradient where V is beyond the reach and nearer to R than V_c is: it has gone far enough.
    Schulman et al. 2017's code; Huang et al. 2022 ("The 37 implementation details of PPO") and Engstrom et al. 2020,
    arXiv:2005.12729, find no use in it, so that without a reach the loss is ½ (V - R)².
    """
    error = (values - returns).square()
    if reach is None:
        return error / 2
    assert earlier is not None, "values are clipped around those at collection"
    within_reach = earlier + torch.maximum(torch.minimum(values - earlier, reach), -reach)
    return torch.maximum(error, (within_reach - returns).square()) / 2


def value_term(options: ValueLossOptions) -> LossTerm:
    """The value loss of every token, with the tokens on which its clip acts as a metric."""

    def per_token(view: TokenView) -> Float[Tensor, " token"]:
        reach = view.columns.value_range
        earlier = None if reach is None else view.columns.values
        return value_loss(view.values, view.columns.returns, earlier=earlier, reach=reach)

    def held(view: TokenView) -> dict[str, Float[Tensor, " token"]]:
        acts = per_token(view) > value_loss(view.values, view.columns.returns)
        return {"value/clip_fraction": acts.to(view.values)}

    return LossTerm(
        name="value",
        per_token=per_token,
        coefficient=options.coefficient,
        needs=frozenset({Need.VALUES}),
        metric="value/loss",
        measures=None if options.clip is None else held,
    )


def entropy_term(coefficient: float) -> LossTerm:
    """A bonus for the entropy of the next-token distribution, per token: the loss is less by c · H, H in nats."""
    return LossTerm(
        name="entropy_bonus",
        per_token=lambda view: -view.entropies,
        coefficient=coefficient,
        needs=frozenset({Need.ENTROPY}),
        reported=False,  # `entropy` is
    )
