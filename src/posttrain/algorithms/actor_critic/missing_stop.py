"""What it costs a completion to be cut off at its limit instead of stopping by itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingStop:
    """Two ways for a missing stop token to cost something, the bound first."""

    penalty: float = 0.0
    """Taken off the reward, in its units."""
    cap: bool = False
    """Whether the reward is at most the least one of the step's completions that stopped."""

    def __post_init__(self) -> None:
        if not self.penalty >= 0:
            raise UserError(f"missing_stop_penalty = {self.penalty}: is negative; use 0 or more.")

    @property
    def acts(self) -> bool:
        """Whether it does anything."""
        return bool(self.penalty) or self.cap


def rewards_with_missing_stops(
    rewards: Float64[Tensor, "prompt group"], truncated: Bool[Tensor, "prompt group"], *, missing_stop: MissingStop
) -> Float64[Tensor, "prompt group"]:
    """Rewards as they are for completions that stopped, and lower ones for those that were cut off; NaN stays NaN.

        r' = min(r, min of the rewards of those that stopped) - penalty        the minimum with `cap` alone

    A penalty alone may be outweighed by what an endless answer earns; with the bound running on never pays.  Where
    nothing in the step stopped there is no bound.
    """
    lowered = rewards
    stopped = rewards[~truncated & ~rewards.isnan()]
    if missing_stop.cap and len(stopped):
        lowered = torch.where(rewards.isnan(), rewards, rewards.clamp(max=stopped.min().item()))
    return torch.where(truncated, lowered - missing_stop.penalty, rewards)
