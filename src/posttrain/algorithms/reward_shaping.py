"""What rewards go through before credit is made of them: a length penalty, missing stop tokens, a running scale."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posttrain.algorithms.gae import LEAST_DEVIATION
from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft overlong punishment: the last stretch before the length limit costs reward, more with every token."""

    buffer: float = 0.2
    """Length of that stretch, as a fraction of max_completion_tokens."""
    penalty: float = 1.0
    """What a completion of max_completion_tokens loses, in units of reward."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= 1:
            raise UserError(f"buffer = {self.buffer}: a fraction of max_completion_tokens, above 0 and at most 1.")
        if not self.penalty > 0:
            raise UserError(f"penalty = {self.penalty}: must be above 0; for no punishment write `overlong: null`.")


PAPERS_OVERLONG = Overlong()
"""What DAPO has, in its proportions."""


def overlong_punishment(
    rewards: Float[Tensor, "prompt group"],
    lengths: Int64[Tensor, "prompt group"],
    *,
    max_completion_tokens: int,
    overlong: Overlong,
) -> Float[Tensor, "prompt group"]:
    """Rewards less DAPO's length penalty, linear over the buffer before the length limit.

        r - penalty · clip((|y| - (L - C)) / C, 0, 1),   L = max_completion_tokens, C = buffer · L

    Yu et al. 2025, arXiv:2503.14476.  Unscored (NaN) stays unscored.
    """
    buffer_tokens = overlong.buffer * max_completion_tokens
    into_buffer = (lengths.to(rewards.dtype) - (max_completion_tokens - buffer_tokens)) / buffer_tokens
    return rewards - overlong.penalty * into_buffer.clamp(0, 1)


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
