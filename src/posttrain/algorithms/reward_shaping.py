"""What rewards go through before credit is made of them: a length penalty, missing stop tokens, a running scale."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posttrain.options.bounds import Bounded, PositiveFloat, Rule

LEAST_DEVIATION = 1e-6
"""Of rewards, returns and advantages, in units of reward; a smaller one is rounding and nothing is divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong(Bounded):
    """DAPO's soft overlong punishment: the last stretch before the length limit costs reward, more with every token."""

    buffer: Annotated[float, Gt(0), Le(1)] = 0.2
    """Length of that stretch, as a fraction of max_completion_tokens."""
    penalty: PositiveFloat = 1.0
    """What a completion of max_completion_tokens loses, in units of reward.  For none write `overlong: null`."""


PAPERS_OVERLONG = Overlong()


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


def rewards_with_missing_stops(
    rewards: Float64[Tensor, "prompt group"], truncated: Bool[Tensor, "prompt group"], *, penalty: float, cap: bool
) -> Float64[Tensor, "prompt group"]:
    """Lower rewards for completions that were cut off at their limit; NaN stays NaN.

        r' = min(r, min of the rewards of those that stopped) - penalty        the minimum with `cap` only

    An endless answer may earn more than a penalty takes; with the bound, running on never pays.  If no completion
    of the step stopped, the bound does not apply.
    """
    lowered = rewards
    stopped = rewards[~truncated & ~rewards.isnan()]
    if cap and len(stopped):
        lowered = torch.where(rewards.isnan(), rewards, rewards.clamp(max=stopped.min().item()))
    return torch.where(truncated, lowered - penalty, rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScaling(Bounded):
    """Rewards of a learned model in units that values and KL coefficients are made for; not for rewards of 0 and 1."""

    centre: bool = True
    """Take off the mean of the first step: what the policy earned before it was trained."""
    scale: bool = True
    """Divide by the deviation of all rewards so far."""
    clip: Annotated[float, Gt(0)] | None = 10.0
    """Largest magnitude of a scaled reward; null means no limit."""

    rules = (
        Rule("clip", lambda o: o.centre or o.scale or o.clip, "does nothing.  Set centre or scale, or leave it out."),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStatistics:
    """All rewards that a run has seen: how many, their mean, the sum of their squared distances from it."""

    first_mean: float = 0.0
    """Of the first step that had any."""
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def with_rewards(self, rewards: Float64[Tensor, "prompt group"]) -> "RewardStatistics":
        """The statistics with these rewards added; NaN is skipped.

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

    `statistics` hold these rewards already.  Nothing is divided while the deviation is below 1e-6.
    """
    if options.centre:
        rewards = rewards - statistics.first_mean
    if options.scale and statistics.deviation >= LEAST_DEVIATION:
        rewards = rewards / statistics.deviation
    if options.clip is None:
        return rewards
    return torch.where(rewards.isnan(), rewards, rewards.clamp(-options.clip, options.clip))
