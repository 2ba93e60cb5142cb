"""The reward functions of a session: the caller's, the recipe's or the task's, and what replies earn."""

from collections.abc import Sequence

from posttrain.config.sections import CollectConfig, SampledSections
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.rewards.grading.dispatch import require_rewarded_rows
from posttrain.rewards.grading.environment_reward import ENVIRONMENT_REWARD
from posttrain.rewards.grading.function import RewardFunction, with_distinct_names
from posttrain.rewards.grading.grade import require_enforceable
from posttrain.rewards.grading.resources import ChecksRows, Resources, require_use_for_cache
from posttrain.rewards.model import reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.tasks.base import Task, task_rewards


def rewards_of(
    config: SampledSections, given: Sequence[RewardFunction], task: Task, policy: Policy, *, replies_pay: bool = False
) -> tuple[RewardFunction, ...]:
    """The caller's functions and those of the config, else the task's; with `replies_pay`, the environment's last."""
    rewards = (*given, *(load_reward(item) for item in config.rewards)) or task_rewards(task)
    if not rewards and not replies_pay:
        remedy = "Name one under `rewards`, such as my_rewards.py:solved, or in Python give rewards=[solved]."
        judged = "  Or set judge.name = llm or person." if isinstance(config, CollectConfig) else ""
        raise UserError(f"rewards: the task has none of its own, and none is given.  {remedy}{judged}")
    require_use_for_cache(rewards, config.grading)
    for function in rewards:
        require_enforceable(function, config.grading)
        for model in reward_models_in(function.call):
            model.require_apart(policy.model)
    if not replies_pay:
        return with_distinct_names(rewards)
    ours, *others = with_distinct_names((ENVIRONMENT_REWARD, *rewards))  # it keeps its name
    return (*others, ours)


def without_environment(rewards: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
    return tuple(each for each in rewards if each != ENVIRONMENT_REWARD)


def require_sound_rows(task: Task, rewards: Sequence[RewardFunction], resources: Resources) -> None:
    """Refuse rows that no reward applies to, or that a reward's check rejects."""
    if not (rows := task.rows_to_reward()):
        return
    require_rewarded_rows(rows, rewards)
    for function in rewards:
        checked: object = function.call
        if isinstance(checked, ChecksRows):
            checked.check_rows([row for row in rows if function.settings.applies(row[1])], resources)
