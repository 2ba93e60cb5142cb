"""Metrics of completions with an environment: turns, tools, replies and ends; none of a step without one."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from posttrain.records import Finish, Group, Rollout

MOST_TOOLS = 20
"""Names of tools with metrics of their own, the first in alphabetical order: a policy may call what there is not."""


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Turns, calls, replies and ends of a step's completions."""
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
    """Calls in all and by tool, and how many of them failed; TRL's names for those in all."""
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
