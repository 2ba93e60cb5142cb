"""The metrics of a step, pure functions of its records; docs/metrics.md lists every name with its meaning and unit.

A quantity that is not defined in a step (the mean score of a function that scored nothing) is left out, never 0.  Names
are TRL's if the quantity is the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import torch
from jaxtyping import Bool
from torch import Tensor

from posttrain.algorithms.advantages import informative
from posttrain.records import Grades, Group
from posttrain.rewards.grading.call_log import mean
from posttrain.runs.alarms import repeated_share

NO_DEVIATION = 1e-8
"""Deviation that TRL treats as 0, in units of reward."""


def step_metrics(groups: Sequence[Group], grades: Grades, informed: Bool[Tensor, "prompt group"]) -> dict[str, float]:
    """Metrics of groups, grades and which completions have an advantage; with dynamic sampling of the kept groups."""
    return {
        **reward_metrics(grades),
        **source_metrics(groups, grades),
        **outcome_metrics(grades.outcomes),
        **logged_metrics(grades.logged),
        **completion_metrics(groups),
        "frac_zero_advantage": (~informed).double().mean().item(),
    }


def reward_metrics(grades: Grades) -> dict[str, float]:
    """Rewards over the step, within groups, and by function; rollouts without a score are left out."""
    by_group = [without_nan(row) for row in grades.rewards]
    rewards = [reward for group in by_group for reward in group]
    metrics = {
        "frac_uninformative_groups": (~informative(grades.totals)).double().mean().item(),
        "frac_reward_zero_std": fmean(len(group) >= 2 and stdev(group) <= NO_DEVIATION for group in by_group),
        "frac_unscored": grades.rewards.isnan().double().mean().item(),
        "num_score_failures": float(grades.num_failures),
        "num_cached_scores": float(grades.num_cached),
    }
    if rewards:
        metrics["reward"] = fmean(rewards)
    if len(rewards) >= 2:
        metrics["reward_std"] = stdev(rewards)
    spreads = [stdev(group) for group in by_group if len(group) >= 2]
    if spreads:
        metrics["reward_std_within_groups"] = fmean(spreads)
    for name, scores in zip(grades.names, grades.scores, strict=True):
        values = without_nan(scores)
        if values:
            metrics[f"rewards/{name}/mean"] = fmean(values)
        if len(values) >= 2:
            metrics[f"rewards/{name}/std"] = stdev(values)
    for name, marked, scores in zip(grades.names, grades.marked, grades.scores, strict=True):
        if name in grades.marks and (values := marked[~scores.isnan()].tolist()):
            metrics[f"process_rewards/{name}/mean"] = fmean(values)
    return metrics


def source_metrics(groups: Sequence[Group], grades: Grades) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for source in sorted({group.prompt.source for group in groups if group.prompt.source}):
        of_source = torch.tensor([group.prompt.source == source for group in groups])
        metrics[f"sources/{source}/num_groups"] = float(of_source.sum())
        if rewards := without_nan(grades.rewards[of_source]):
            metrics[f"sources/{source}/reward"] = fmean(rewards)
    return metrics


def outcome_metrics(outcomes: Mapping[str, tuple[tuple[str, ...], ...]]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, by_group in outcomes.items():
        counts = Counter(outcome for group in by_group for outcome in group if outcome)
        metrics |= {f"outcomes/{name}/{outcome}": count / counts.total() for outcome, count in sorted(counts.items())}
    return metrics


def logged_metrics(logged: Mapping[str, tuple[tuple[Mapping[str, float] | None, ...], ...]]) -> dict[str, float]:
    """Numbers that reward functions logged: means over completions, however these were divided into calls."""
    metrics: dict[str, float] = {}
    for function, by_group in logged.items():
        logs = [numbers for group in by_group for numbers in group if numbers]
        for name in sorted({name for numbers in logs for name in numbers}):
            metrics[f"logged/{function}/{name}"] = mean([numbers[name] for numbers in logs if name in numbers])
    return metrics


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths in sampled tokens, ends, repetition, and the policy's certainty."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_sampled for rollout in rollouts]
    metrics = {
        **spread_of_lengths("length", lengths),
        "completions/clipped_ratio": fmean(rollout.finish.cut_off for rollout in rollouts),
        "completions/repetition": fmean(repeated_share(rollout.sequence.sampled_tokens) for rollout in rollouts),
        "tokens/prompt": float(sum(len(group.prompt.tokens) for group in groups)),
        "tokens/completion": float(sum(lengths)),
        "entropy_estimate": -fmean(logprob for rollout in rollouts for logprob in rollout.logprobs),
    }
    terminated = [rollout.num_sampled for rollout in rollouts if not rollout.finish.cut_off]
    return metrics | (spread_of_lengths("terminated_length", terminated) if terminated else {})


def spread_of_lengths(name: str, lengths: Sequence[int]) -> dict[str, float]:
    return {
        f"completions/mean_{name}": fmean(lengths),
        f"completions/min_{name}": float(min(lengths)),
        f"completions/max_{name}": float(max(lengths)),
    }


def step_tokens(groups: Sequence[Group]) -> int:
    return sum(len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts)


def without_nan(values: Tensor) -> list[float]:
    return values[~torch.isnan(values)].flatten().tolist()
