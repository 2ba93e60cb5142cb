"""TRL's metrics of a step and of an evaluation: the quantities that its source computes, under its names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms.advantages import decoupled_zscore
from posttrain.records import Grades, Group
from posttrain.training import metrics
from posttrain.trl.configs.recipe import DEVIATION_EPSILON, scale_of
from posttrain.trl.configs.trainer_configs import GRPOConfig, SampledFields

Entry = dict[str, float | None]
ZeroDeviation = Literal["group", "batch", "sum"]
"""What frac_reward_zero_std is computed from: each group, the step's rewards, or the sum of normalised rewards."""
CLIPPED = {name: name for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")}
"""Shares of tokens or completions, by TRL's name; a group without advantage is not trained on, and never clipped."""
LENGTHS = ("mean_length", "min_length", "max_length")
OF_COMPLETIONS = tuple(f"completions/{name}" for name in (*LENGTHS, "clipped_ratio"))
OF_TERMINATED = tuple(f"completions/{name.replace('_', '_terminated_')}" for name in LENGTHS)
LAST = ("num_tokens", "learning_rate", "grad_norm")
"""An entry has the last value of these, and the mean since the previous entry of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What TRL logs for a run, as decided by its arguments."""

    clipped: Mapping[str, str]
    """Shares of clipped tokens or completions: TRL's name and ours."""
    zero_deviation: ZeroDeviation = "group"
    clips_completions: bool = False
    """Whether these are shares of all completions; else of the tokens of completions that are not masked."""
    masks_truncated: bool = False
    kl_coefficient: float | None = None
    """Coefficient of a KL that is subtracted from the rewards, with `kl` as its mean; None if `kl` is a loss term."""

    def penalised_kl(
        self, groups: Sequence[Group], penalties: Float64[Tensor, " token"] | None
    ) -> dict[str, float | None]:
        """TRL's `kl` of RLOO: the mean of log μ/ref over the sampled tokens, from its cost per token."""
        if self.kl_coefficient is None or penalties is None:
            return {}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        masked = [self.masks_truncated and each.finish.cut_off for each in rollouts]
        counted = [not cut for cut, each in zip(masked, rollouts, strict=True) for _ in range(each.num_sampled)]
        kept = penalties[torch.tensor(counted)]
        return {"kl": -kept.mean().item() / self.kl_coefficient if len(kept) else 0.0}

    def trained_share(self, *, tokens: float, completions: float, groups: Sequence[Group], passes: int = 1) -> float:
        """Tokens, or completions, trained on in all passes, as a share of the number that TRL divides by."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self.clips_completions:
            return completions / (len(rollouts) * passes)
        counted = [each for each in rollouts if not (self.masks_truncated and each.finish.cut_off)]
        return tokens / (sum(each.num_sampled for each in counted) * passes) if counted else 0.0


def logged_by(args: SampledFields) -> Logged:
    """What TRL logs with these arguments."""
    masks = args.mask_truncated_completions
    if not isinstance(args, GRPOConfig):
        return Logged(clipped=CLIPPED, clips_completions=True, masks_truncated=masks, kl_coefficient=args.beta or None)
    summed = args.multi_objective_aggregation == "normalize_then_sum"
    return Logged(
        zero_deviation="sum" if summed else "batch" if scale_of(args) == "batch" else "group",
        # cispo bounds ratios on one side.
        clipped={"cispo_clip_ratio": "clip_ratio/high_mean"} if args.loss_type == "cispo" else CLIPPED,
        clips_completions=args.importance_sampling_level == "sequence",
        masks_truncated=masks,
    )


def sampled_entry(groups: Sequence[Group], grades: Grades, logged: Logged) -> Entry:
    """TRL's metrics of completions and rewards.

    `reward_std` is over all rewards of the batch, sample deviation.  Lengths of completions that stopped are 0 where
    none did.
    """
    ours, lengths = metrics.reward_metrics(grades), metrics.completion_metrics(groups)
    rewards = metrics.without_nan(grades.rewards)
    entry: Entry = {name: lengths[name] for name in OF_COMPLETIONS}
    entry |= {name: lengths.get(name, 0.0) for name in OF_TERMINATED}
    each = [f"rewards/{name}/{what}" for name in grades.names for what in ("mean", "std")]
    entry |= {name: ours.get(name) for name in each}
    entry |= {name.split("/", 2)[2]: value for name, value in metrics.logged_metrics(grades.logged).items()}
    entry["reward"] = ours.get("reward")
    entry["reward_std"] = stdev(rewards) if len(rewards) >= 2 else None
    entry["frac_reward_zero_std"] = share_without_deviation(grades, logged.zero_deviation)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.has_environment for rollout in rollouts):
        calls = metrics.tool_metrics(rollouts)
        entry |= {name: calls.get(name, 0.0) for name in ("tools/call_frequency", "tools/failure_frequency")}
    return entry


def share_without_deviation(grades: Grades, over: ZeroDeviation) -> float:
    """The share of completions whose rewards are divided by a deviation of 0; of one for all of them it is 0 or 1."""
    if over == "group":
        return metrics.reward_metrics(grades)["frac_reward_zero_std"]
    if over == "batch":
        rewards = metrics.without_nan(grades.rewards)
        return float(len(rewards) < 2 or stdev(rewards) <= metrics.NO_DEVIATION)
    summed = decoupled_zscore(grades.clipped, grades.weights, deviation="sample", epsilon=DEVIATION_EPSILON)
    return float(not summed.any())


def token_entry(means: Mapping[str, float], logged: Logged, *, trained_share: float) -> Entry:
    """TRL's metrics of tokens, from our means over trained tokens and their share of what TRL divides by."""
    entry: Entry = {name: means[name] for name in ("kl", "entropy") if name in means}
    return entry | {theirs: means.get(ours, 0.0) * trained_share for theirs, ours in logged.clipped.items()}


def taken_entry(entries: list[Entry]) -> Entry:
    """The mean of the steps, or of LAST the last values; None if no step has a number.  The list is then empty."""
    found: Entry = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        values = [value for entry in entries if (value := entry.get(name)) is not None and not math.isnan(value)]
        found[name] = (values[-1] if name in LAST else fmean(values)) if values else None
    entries.clear()
    return found
