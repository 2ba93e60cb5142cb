"""The metrics of a step, pure functions of its records; docs/metrics.md lists every name with its meaning and unit.

A quantity that is undefined in a step (the mean score of a function that scored nothing) is left out, never 0.  If TRL
has the same quantity, its name is used.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from posttrain.algorithms.advantages import informative
from posttrain.records import Finish, Grades, Group, Rollout
from posttrain.rewards.grading.call_log import exact_mean
from posttrain.runs.alarms import repeated_share
from posttrain.runs.reports import UpdateTokens

FIRST_ALONE = "sampling/sampling_logp_difference/mean"
"""Metrics from the first update, when sampler and trainer have the same weights."""
STALENESS = "staleness"
"""The column with the age of each token's weights, in updates; only present if some are older."""
NO_DEVIATION = 1e-8
"""Standard deviation that TRL treats as 0, in units of reward."""
MOST_TOOLS = 20
"""Number of tools with their own metrics, in alphabetical order: a policy may call tools that do not exist."""


def step_metrics(
    groups: Sequence[Group], grades: Grades, informed: Bool[Tensor, "prompt group"] | None = None
) -> dict[str, float]:
    """Metrics of groups, grades and, if it is known, which completions have an advantage.

    With dynamic sampling these are the kept groups.
    """
    return {
        **reward_metrics(grades),
        **source_metrics(groups, grades),
        **outcome_metrics(grades.outcomes),
        **logged_metrics(grades.logged),
        **completion_metrics(groups),
        **turn_metrics(groups),
        **({} if informed is None else {"frac_zero_advantage": (~informed).double().mean().item()}),
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
    """Numbers that reward functions logged: means over completions, independent of how calls were split."""
    metrics: dict[str, float] = {}
    for function, by_group in logged.items():
        logs = [numbers for group in by_group for numbers in group if numbers]
        for name in sorted({name for numbers in logs for name in numbers}):
            metrics[f"logged/{function}/{name}"] = exact_mean([numbers[name] for numbers in logs if name in numbers])
    return metrics


def completion_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths in sampled tokens, finish reasons, repetition, and the policy's certainty.

    A completion whose environment failed does not count as a length, only in `tokens/completion`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sound = [rollout for rollout in rollouts if not rollout.finish.failed] or rollouts
    lengths = [rollout.num_sampled for rollout in sound]
    metrics = {
        **spread_of_lengths("length", lengths),
        "completions/clipped_ratio": fmean(rollout.finish.cut_off for rollout in rollouts),
        "completions/repetition": fmean(repeated_share(rollout.sequence.sampled_tokens) for rollout in rollouts),
        "tokens/prompt": float(sum(len(group.prompt.tokens) for group in groups)),
        "tokens/completion": float(sum(rollout.num_sampled for rollout in rollouts)),
        "entropy_estimate": -fmean(logprob for rollout in rollouts for logprob in rollout.logprobs),
    }
    terminated = [rollout.num_sampled for rollout in sound if not rollout.finish.cut_off]
    return metrics | (spread_of_lengths("terminated_length", terminated) if terminated else {})


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Turns, calls, replies and finish reasons of a step's completions; empty without an environment."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not any(rollout.has_environment for rollout in rollouts):
        return {}
    turns = [rollout.num_turns for rollout in rollouts]
    seconds = [turn.seconds for rollout in rollouts for turn in rollout.turns]
    given, tokens = (sum(each) for each in zip(*map(given_and_all, rollouts), strict=True))
    ends = Counter(rollout.finish for rollout in rollouts)
    return {
        "turns/mean": fmean(turns),
        "turns/max": float(max(turns)),
        "tokens/given": float(given),
        **({"completions/given_share": given / tokens} if tokens else {}),
        **({"environment/reply_seconds": fmean(seconds), "environment/slowest_reply": max(seconds)} if seconds else {}),
        "environment/num_failed": float(ends[Finish.FAILED]),
        **{f"finish/{finish}": ends[finish] / len(rollouts) for finish in Finish},
        **tool_metrics(rollouts),
    }


def given_and_all(rollout: Rollout) -> tuple[int, int]:
    return len(rollout.tokens) - rollout.num_sampled, len(rollout.tokens)


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Calls in total and by tool, and how many failed; totals have TRL's names."""
    calls = [call for rollout in rollouts for turn in rollout.turns for call in turn.calls]
    if not calls:
        return {}
    made, failed = Counter(call.name for call in calls), Counter(call.name for call in calls if call.failed)
    metrics = {
        "tools/call_frequency": len(calls) / len(rollouts),
        "tools/failure_frequency": failed.total() / len(calls),
    }
    for name in sorted(made)[:MOST_TOOLS]:
        metrics[f"tools/{name}/call_frequency"] = made[name] / len(rollouts)
        metrics[f"tools/{name}/failure_frequency"] = failed[name] / made[name]
    return metrics


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """One optimiser step."""

    loss: float
    grad_norms: Mapping[str, float]
    """Norm of the gradient of each trained module before clipping."""
    learning_rate: float
    num_micro_batches: int
    num_tokens: int
    """Number of completion tokens trained on."""
    num_completions: int
    """Number of completions trained on."""
    sums: Mapping[str, float]
    """Sums over the tokens, by the metric that is their mean."""
    completion_sums: Mapping[str, float]
    """The same for metrics that are means over completions."""
    ratio_range: tuple[float, float]
    """Smallest and largest ratio π/μ."""
    gaps: Float64[Tensor, " token"]
    """|log π - log μ| in nats for each token sampled by the weights before the step."""
    effective_sample_size: float | None = None
    """(Σ w)² / (n Σ w²) with w = π/μ of each of n tokens; None if the weights before the step sampled all of them."""
    tokens: UpdateTokens | None = None
    """The columns of the tokens, if they are kept."""
    taken: bool = True
    """Whether the step was taken; False if the KL limit was exceeded before it."""

    @property
    def kl_behaviour(self) -> float:
        return self.sums["kl_behaviour"] / self.num_tokens


def kl_limit(limit: float | None, before: Sequence[UpdateReport], *, noisy: bool) -> float | None:
    """The KL to the sampling policy above which the next update of a step is skipped; None: never skipped.

    With `noisy`, an adapter's dropout adds noise to the KL; the first update measures it, and the limit includes it.
    """
    if limit is None or (noisy and not before):
        return None
    return limit + (before[0].kl_behaviour if noisy else 0.0)


def update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """One step's metrics: means and extremes over the tokens of all updates; loss and norm are means over updates.

    The gap between sampler and trainer is from the first update, over tokens sampled by the weights before it.
    """
    if not reports:
        return {}
    first, num_tokens = reports[0], sum(report.num_tokens for report in reports)
    num_completions = sum(report.num_completions for report in reports)
    means = {name: sum(report.sums[name] for report in reports) / num_tokens for name in first.sums}
    for name in first.completion_sums:
        means[name] = sum(report.completion_sums[name] for report in reports) / num_completions
    sampler: dict[str, float] = {}
    if first.effective_sample_size is None:
        means[FIRST_ALONE] = first.sums[FIRST_ALONE] / first.num_tokens
    else:
        del means[FIRST_ALONE]
        sampler["sampling/effective_sample_size"] = first.effective_sample_size
        if len(first.gaps):
            sampler[FIRST_ALONE] = first.gaps.mean().item()
    if len(first.gaps):
        sampler["sampling/sampling_logp_difference/max"] = first.gaps.max().item()
    modules = first.grad_norms if len(first.grad_norms) > 1 else ()
    return {
        "loss": fmean(report.loss for report in reports),
        "grad_norm": fmean(math.hypot(*report.grad_norms.values()) for report in reports),
        **{f"grad_norm/{module}": fmean(report.grad_norms[module] for report in reports) for module in modules},
        "learning_rate": reports[-1].learning_rate,
        "num_micro_batches": float(sum(report.num_micro_batches for report in reports)),
        "tokens/trained": float(num_tokens),
        "completions/trained": float(num_completions),
        **means,
        **sampler,
        "ratio/min": min(report.ratio_range[0] for report in reports),
        "ratio/max": max(report.ratio_range[1] for report in reports),
    }
