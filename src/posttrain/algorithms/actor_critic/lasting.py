"""Numbers of a run that outlive a step: the coefficient of an adaptive KL, and the scale of rewards."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKl:
    """Moves the coefficient of a KL in the reward until the KL is what is wanted."""

    target: float
    """The KL to the reference that is wanted, in nats."""
    per: Literal["sequence", "token"] = "sequence"
    """What the target is of.  sequence: a whole completion (Ziegler's 6 nats).  token: the mean token; the same number
    then allows as many times more as completions have tokens."""
    horizon: float = 10_000.0
    """Completions after which a KL that is 20 % too high has multiplied the coefficient by about e^.2."""

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise UserError(f"target = {self.target}: a KL in nats; use a finite number above 0.")
        if not self.horizon > 0:
            raise UserError(f"horizon = {self.horizon}: a number of completions; use more than 0.")


def next_coefficient(coefficient: float, kl: float, *, num_rollouts: int, options: AdaptiveKl) -> float:
    """The coefficient for the next step, given the KL of this one.

        β' = β (1 + clip(KL / target - 1, -.2, .2) · n / horizon)        n: completions of the step

    Ziegler et al. 2019, "Fine-tuning language models from human preferences", arXiv:1909.08593, §2.2.  Never below 0.
    """
    error = min(max(kl / options.target - 1, -0.2), 0.2)
    return coefficient * max(0.0, 1 + error * num_rollouts / options.horizon)


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

    `statistics` hold these rewards already.  Where nothing has differed yet nothing is divided.
    """
    if options.centre:
        rewards = rewards - statistics.first_mean
    if options.scale and statistics.deviation > 0:
        rewards = rewards / statistics.deviation
    return (
        rewards
        if options.clip is None
        else torch.where(rewards.isnan(), rewards, rewards.clamp(-options.clip, options.clip))
    )
