"""Rewards in units that values and KL coefficients are made for: the running mean and deviation of a run's rewards."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.gae import LEAST_DEVIATION
from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScaling:
    """Rewards of a learned model in units that values and KL coefficients are made for; not for rewards of 0 and 1."""

    centre: bool = True
    """Take off the mean of the first step: what the policy earned before it was trained."""
    scale: bool = True
    """Divide by the deviation of all rewards so far."""
    clip: float | None = 10.0
    """Largest magnitude of what comes out; null is none."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip = {self.clip}: leaves no reward; use a number above 0, or null.")
        if not (self.centre or self.scale or self.clip is not None):
            raise UserError("reward_scaling does nothing: centre and scale are false and clip is null.  Leave it out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStatistics:
    """Of all rewards that a run has seen: how many, their mean, the sum of their squared distances from it."""

    first_mean: float = 0.0
    """Of the first step that had any."""
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """√(squares / count); 0 of none."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def with_rewards(self, rewards: Float64[Tensor, "prompt group"]) -> "RewardStatistics":
        """Those of these rewards as well; NaN is none.

        M = M_a + M_b + (mean_b - mean_a)² n_a n_b / n        Chan, Golub & LeVeque 1983
        """
        known = rewards[~rewards.isnan()]
        if not len(known):
            return self
        mean, count = known.mean().item(), self.count + len(known)
        apart = mean - self.mean
        return RewardStatistics(
            first_mean=self.first_mean if self.count else mean,
            count=count,
            mean=self.mean + apart * len(known) / count,
            squares=self.squares + (known - mean).square().sum().item() + apart**2 * self.count * len(known) / count,
        )


def scaled_rewards(
    rewards: Float64[Tensor, "prompt group"], statistics: RewardStatistics, options: RewardScaling
) -> Float64[Tensor, "prompt group"]:
    """clip((r - mean of the first step) / deviation so far, -clip, clip); NaN stays NaN.

    `statistics` hold these rewards already.  Where nothing has differed yet, by 1e-6 or
    more, nothing is divided.
    """
    if options.centre:
        rewards = rewards - statistics.first_mean
    if options.scale and statistics.deviation >= LEAST_DEVIATION:
        rewards = rewards / statistics.deviation
    return (
        rewards
        if options.clip is None
        else torch.where(rewards.isnan(), rewards, rewards.clamp(-options.clip, options.clip))
    )
