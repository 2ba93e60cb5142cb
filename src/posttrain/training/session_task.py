"""The task of a session and its rewards: the caller's, or those of the config."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from posttrain.config import Config
from posttrain.config.sections import CollectConfig, SampledSections
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.task import TaskOptions
from posttrain.rewards.grading.dispatch import require_rewarded_rows
from posttrain.rewards.grading.function import ENVIRONMENT_REWARD, RewardFunction, with_distinct_names
from posttrain.rewards.grading.grade import require_enforceable
from posttrain.rewards.grading.resources import ChecksRows, Resources, require_use_for_cache
from posttrain.rewards.model import reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.tasks.base import Task, task_rewards
from posttrain.tasks.dataset import Rows
from posttrain.tasks.task_registry import load_task, require_task


def task_of(
    config: Config,
    renderer: TokenizerRenderer,
    *,
    given: Task | None,
    rows: Rows | None,
    held_out_rows: Rows | None,
    context: int,
) -> Task:
    """The caller's task, or the config's; long prompts are skipped or cut to leave room for a completion.

    The rows replace those of the config, and `context` is the model's.
    """
    if given is not None:
        for name, each in (("rows", rows), ("held_out_rows", held_out_rows)):
            if each is not None:
                raise UserError(f"{name}: a task, which makes its own prompts, is given as well.  Leave one out.")
        return require_task(given, "task")
    room = min(context, config.update.tokens_per_microbatch)
    return load_task(
        task_with_room(config, "rollout.max_completion_tokens", config.rollout.max_completion_tokens, room),
        renderer,
        seed=config.run.seed,
        prompts_per_step=config.rollout.prompts_per_step,
        rows=rows,
        held_out_rows=held_out_rows,
    )


def task_with_room(config: SampledSections, option: str, most: int, room: int) -> TaskOptions | Mapping[str, object]:
    """The task's options; if long prompts are skipped or cut, with a maximum length that leaves room for an answer."""
    task = config.task
    if not isinstance(task, DatasetOptions) or task.over_long == "error" or task.max_prompt_tokens is not None:
        return task
    if room <= most:
        rule = f"{option} = {most} leaves no room for a prompt in {room} tokens, the model's context or a micro-batch"
        raise UserError(f"task.over_long = {task.over_long}: {rule}.  Lower it, or set task.max_prompt_tokens.")
    return replace(task, max_prompt_tokens=room - most)


def rewards_of(
    config: SampledSections, given: Sequence[RewardFunction], task: Task, policy: Policy, *, replies_pay: bool = False
) -> tuple[RewardFunction, ...]:
    """The caller's functions and the config's, else the task's; with `replies_pay`, then the environment's rewards."""
    rewards = (*given, *(load_reward(item) for item in config.rewards)) or task_rewards(task)
    if not rewards and not replies_pay:
        remedy = "Name one under `rewards`, such as my_rewards.py:solved, or in Python give rewards=[solved]."
        judged = "  Or set judge.name = llm or person." if isinstance(config, CollectConfig) else ""
        raise UserError(f"rewards: none are given, and the task does not have its own.  {remedy}{judged}")
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
    """Reject rows that no reward applies to, or that a reward's check rejects."""
    if not (rows := task.rows_to_reward()):
        return
    require_rewarded_rows(rows, rewards)
    for function in rewards:
        checked: object = function.call
        if isinstance(checked, ChecksRows):
            checked.check_rows([row for row in rows if function.settings.applies(row[1])], resources)
