"""How much better than expected each rollout was: rewards in, advantages out, one function per rule.

A NaN reward means that nothing scored the rollout: no statistic counts it and its advantage is 0.  Rewards are measured
from the smallest one before they are averaged, so equal rewards centre to exactly 0: the mean of equal floats can be an
ulp off, and dividing by that residue would turn "no information" into ±1.  Rewards that differ only by rounding, such
as .1 + .2 and .3, count as equal.  Before that, rewards may lose a length penalty, lack a stop token, or be scaled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posttrain.errors import RunError, UserError
from posttrain.options.bounds import Bounded, PositiveFloat, Rule
from posttrain.records import Grades

Deviation = Literal["population", "sample"]

ROUNDING = 8
"""Units in the last place, of a group's largest |reward|, that rounding may put between rewards that are equal."""
LEAST_DEVIATION = 1e-6
"""Smallest deviation of rewards, returns and advantages, in units of reward; a smaller one is rounding, and no rule
divides by it."""


def raw(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """The reward itself: no baseline, hence no bias and much variance.

    A_ij = r_ij        Williams 1992, Machine Learning 8 (REINFORCE)
    """
    return torch.where(rewards.isnan(), 0.0, rewards)


def batch_centred(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Reward above the mean of the whole step, all prompts together.

        A_ij = r_ij - mean_kl r_kl

    With N scored rollouts the expected gradient is (1 - 1/N) of the true one, since each reward is in its own baseline.
    """
    return group_centred(rewards.reshape(1, -1)).reshape(rewards.shape)


def group_centred(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Reward above the mean of its group, in units of reward.

        A_ij = r_ij - mean_k r_ik        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783

    The expected gradient is (1 - 1/G) of the true one.  A group with fewer than two scored rollouts is 0, and so is one
    whose rewards differ by no more than `ROUNDING`.
    """
    scored = ~rewards.isnan()
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1, keepdim=True)
    above = torch.where(scored, rewards - lowest, 0.0)
    unit = torch.finfo(rewards.dtype).eps * torch.where(scored, rewards.abs(), 0.0).amax(dim=1, keepdim=True)
    above = torch.where(above.amax(dim=1, keepdim=True) > ROUNDING * unit, above, 0.0)
    mean = above.sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True)
    return torch.where(scored, above - mean, 0.0)


def group_zscore(
    rewards: Float[Tensor, "prompt group"], *, deviation: Deviation = "population", epsilon: float = 0.0
) -> Float[Tensor, "prompt group"]:
    """Centred reward in units of its group's standard deviation (dimensionless).

        A_ij = (r_ij - mean_k r_ik) / (std_k r_ik + ε)        Shao et al. 2024 (GRPO), arXiv:2402.03300

    std divides by the G scored rollouts of the group (population), or by G - 1 (sample).  ε, in units of reward, is 0
    in the paper and 1e-4 in TRL.  Whatever it is, a group whose rewards are all equal, or with fewer than two scored
    rollouts, is exactly 0.
    """
    centred = group_centred(rewards)
    largest = centred.abs().amax(dim=1, keepdim=True)
    scaled = centred / largest  # at most 1, so that the squares of tiny rewards do not underflow
    num_scored = (~rewards.isnan()).sum(dim=1, keepdim=True)
    degrees = num_scored - 1 if deviation == "sample" else num_scored
    spread = (scaled.square().sum(dim=1, keepdim=True) / degrees).sqrt()
    return torch.where(largest > 0, scaled / (spread + epsilon / largest), 0.0)


def batch_scaled(
    rewards: Float[Tensor, "prompt group"], *, deviation: Deviation = "population", epsilon: float = 0.0
) -> Float[Tensor, "prompt group"]:
    """Reward above the mean of its group, in units of the deviation of all rewards of the step (dimensionless).

        A_ij = (r_ij - mean_k r_ik) / (std_kl r_kl + ε)        TRL 1.16, scale_rewards = "batch"

    A prompt that is nearly always solved does not weigh more than others, unlike under `group_zscore`.  A group
    whose rewards are all equal is exactly 0.
    """
    apart = group_centred(rewards.reshape(1, -1))
    largest = apart.abs().amax()
    num_scored = (~rewards.isnan()).sum()
    degrees = num_scored - 1 if deviation == "sample" else num_scored
    spread = ((apart / largest).square().sum() / degrees).sqrt()
    return torch.where(largest > 0, group_centred(rewards) / largest / (spread + epsilon / largest), 0.0)


def standardised(
    deviation: Literal["population", "sample", "none"], *, over: Literal["group", "batch"], epsilon: float
) -> Callable[[Tensor], Tensor]:
    """The rule of advantages that divides the centred reward as the options of an algorithm say.

    Raises UserError for options of a deviation where there is none.
    """
    if deviation != "none":
        return partial({"group": group_zscore, "batch": batch_scaled}[over], deviation=deviation, epsilon=epsilon)
    if over != "group" or epsilon:
        name, value = ("deviation_over", over) if over != "group" else ("deviation_epsilon", epsilon)
        raise UserError(f"{name} = {value}: deviation = none does not divide. Remove one of them.")
    return group_centred


def over_mean(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Centred reward in units of its group's mean (dimensionless): rare successes weigh more.

        A_ij = (r_ij - mean_k r_ik) / mean_k r_ik        Tajwar et al. 2026 (MaxRL), arXiv:2602.02710, algorithm 1

    For rewards of 0 and 1 the expected gradient is that of -Σ_k (1-p)^k / k for k < G, p the chance of a success: the
    first terms of log p, where `group_centred` has only the first, p.  A group whose rewards are all equal is exactly
    0, also one of zeros, and so is one with fewer than two scored rollouts.

    Raises RunError for a reward below 0: the mean may then be 0 or of the other sign.
    """
    counted = raw(rewards)
    if (lowest := counted.min()) < 0:
        raise RunError(f"maxrl: a reward of {lowest.item():g}. It divides by mean rewards: use rewards ≥ 0, or grpo.")
    centred = group_centred(rewards)
    mean = counted.sum(dim=1, keepdim=True) / (~rewards.isnan()).sum(1, keepdim=True)
    return torch.where(centred != 0, centred / mean, 0.0)


def leave_one_out(rewards: Float[Tensor, "prompt group"]) -> Float[Tensor, "prompt group"]:
    """Reward above the mean of the *other* rollouts of its group: an unbiased baseline.

        A_ij = r_ij - mean_{k≠j} r_ik = G/(G-1) · (r_ij - mean_k r_ik)

    Kool et al. 2019; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.  Without a scored sibling the advantage is 0.
    """
    num_scored = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return torch.where(num_scored > 1, group_centred(rewards) * num_scored / (num_scored - 1), 0.0)


def leave_one_out_zscore(rewards: Float[Tensor, "prompt group"], *, epsilon: float) -> Float[Tensor, "prompt group"]:
    """`leave_one_out` in units of its deviation over the whole step, above its mean.

        (A_ij - mean A) / (std A + ε)        TRL 1.16, RLOOTrainer, normalize_advantages

    Sample deviation, over rollouts with a scored sibling; the others get 0.
    """
    scored = ~rewards.isnan()
    compared = scored & (scored.sum(dim=1, keepdim=True) > 1)
    advantages = leave_one_out(rewards)
    if int(compared.sum()) < 2:
        return torch.zeros_like(advantages)
    kept = advantages[compared]
    return torch.where(compared, (advantages - kept.mean()) / (kept.std() + epsilon), 0.0)


def decoupled_zscore(
    scores: Float[Tensor, "function prompt group"],
    weights: Float[Tensor, " function"],
    *,
    deviation: Literal["population", "sample"] = "population",
    epsilon: float = 0.0,
) -> Float[Tensor, "prompt group"]:
    """Each function's scores standardised in their group, then their weighted sum in units of its deviation.

        z_kij = (s_kij - mean_l s_kil) / (std_l s_kil + ε)  each function separately, over the rollouts that it scored
        S_ij  = Σ_k w_k z_kij                               A_ij = S_ij / (std_lm S_lm + ε)

    Liu et al. 2026 (GDPO), arXiv:2601.05242, which also subtracts the mean of S over the step: that mean is 0, as each
    function's z adds up to 0 in every group, and subtracting its rounding would give groups without information an
    advantage.  Which function's scores spread wider no longer matters, only weights do; with the sum, (1, 0) and (0, 1)
    would be worth the same.  std_lm goes over all rollouts that a function of non-zero weight scored; both deviations
    divide by their number (population), or by one less (sample), and have ε added, 0 in the paper and 1e-4 in TRL.
    S that is only rounding, as of two functions that cancel, is exactly 0, and so is a rollout that nothing scored.
    """
    counted = ~scores.isnan() & (weights != 0)[:, None, None]
    z = torch.stack([group_zscore(column, deviation=deviation, epsilon=epsilon) for column in scores])
    parts = torch.where(counted, weights[:, None, None] * z, 0.0)
    total, unit = parts.sum(dim=0), torch.finfo(scores.dtype).eps * parts.abs().sum(dim=0)
    total = torch.where(total.abs() > ROUNDING * unit, total, 0.0)
    largest = total.abs().amax()
    scaled = total / largest  # at most 1, so that the squares of tiny sums do not underflow
    num_scored = counted.any(dim=0).sum()
    spread = (scaled.square().sum() / (num_scored - 1 if deviation == "sample" else num_scored)).sqrt()
    return torch.where(largest > 0, scaled / (spread + epsilon / largest), 0.0)


def informative(rewards: Float[Tensor, "prompt group"]) -> Bool[Tensor, " prompt"]:
    """Whether a group holds two scored rollouts with different rewards: what dynamic sampling keeps."""
    return (group_centred(rewards) != 0).any(dim=1)


def sums_differ(grades: Grades) -> Bool[Tensor, " prompt"]:
    """Whether a group holds two scored rollouts with different rewards, or one whose steps earned something."""
    scored = ~grades.rewards.isnan()
    stepwise = (scored & (grades.marked != 0)[grades.weights != 0].any(dim=0)).any(dim=1)
    return informative(grades.rewards) | stepwise if grades.marks else informative(grades.rewards)


def totals_differ(grades: Grades) -> Bool[Tensor, " prompt"]:
    return informative(grades.totals)


def scores_differ(grades: Grades) -> Bool[Tensor, " prompt"]:
    """Whether a function of non-zero weight scores two rollouts of a group differently."""
    columns = grades.clipped[grades.weights != 0]
    return torch.stack([informative(column) for column in columns]).any(dim=0) if len(columns) else sums_differ(grades)


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
    """Mean of the first step that had rewards."""
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
