"""Samples the completions of a collection: prompts in, scored completions out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from posttrain.binding import bind
from posttrain.commands.collection.pairs import SampledPrompt, sampled_prompts
from posttrain.config.recipes import short_reward
from posttrain.config.sections import CollectConfig, require_one_turn
from posttrain.environments.run_environment import RepliesOfRun, ReplySettings, RunEnvironment
from posttrain.errors import UserError
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Engine, close_engine, load_checked, own_engine, require_room_for
from posttrain.generation.parity import engine_in_parity
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.rollout import HttpOptions
from posttrain.options.task import TaskOptions
from posttrain.rewards.grading.environment_reward import ENVIRONMENT_REWARD
from posttrain.rewards.grading.function import RewardFunction, with_distinct_names
from posttrain.rewards.grading.grade import grade, require_enforceable
from posttrain.rewards.grading.resources import Resources, require_use_for_cache
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.checkpoint import claim_threads
from posttrain.tasks.base import Task, as_reward_functions, task_rewards, training_prompts
from posttrain.tasks.task_registry import load_task

Rows = Iterable[Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class PairObjects:
    """Objects of a caller in Python, in place of those that the config describes."""

    policy: Policy | None = None
    rows: Rows | None = None
    """In place of a dataset's file."""
    rewards: tuple[object, ...] = ()
    """Functions, reward models, or texts as a flag names them; they go before those of the config."""


class PromptSampler:
    """Samples completions of a collection's prompts, and scores them where the config says so; a context manager."""

    def __init__(self, config: CollectConfig, own: PairObjects) -> None:
        self.config = config
        with ExitStack() as held:
            held.enter_context(claim_threads(config.run.threads))
            self.resources = held.enter_context(Resources(config.sandbox))
            self.policy = own.policy or load_policy(config.model, seed=config.run.seed, inference=True)
            self.policy.require_as_made()
            replies = replies_of(config, self.policy, held)
            count, options = config.collect.num_prompts, task_with_room(config, self.policy)
            task = load_task(options, replies.renderer, seed=config.run.seed, prompts_per_step=count, rows=own.rows)
            self.prompts = training_prompts(task, config.collect.round, range(count))
            environment = replies.open(lambda: self.prompts)
            self.workers = environment.workers
            self.rewards = rewards_of_pairs(config, own, task, environment) if config.scored else ()
            longest = max(len(prompt.tokens) for prompt in self.prompts) + config.sampling.max_completion_tokens
            longest = self.policy.max_positions if self.workers else min(longest, self.policy.max_positions)
            self.engine: Engine
            if isinstance(config.engine, Mapping):
                self.engine = own_engine(config.engine, self.policy)
                load_checked(self.engine, ExportedWeights(self.policy), 0)
            elif isinstance(config.engine, HttpOptions):
                from posttrain.generation.http.http_engine import HttpEngine

                sampling = config.sampling.sampling
                self.engine = HttpEngine(self.policy, config.engine, longest=longest, sampling=sampling)
                held.callback(close_engine, self.engine)
                load_checked(self.engine, ExportedWeights(self.policy), 0)
            else:
                self.engine = engine_in_parity(self.policy, max_rows=config.collect.max_rows, longest=longest)
            for prompt in self.prompts:
                require_room_for(prompt, self.engine)
            self._opened = held.pop_all()

    def __enter__(self) -> "PromptSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def batches(self, first: int, advance: Callable[[int], None]) -> Iterator[list[SampledPrompt]]:
        """The completions of all prompts from the draw `first` on, as many together as are decoded side by side."""
        size = max(1, self.config.collect.max_rows // self.config.collect.group_size)
        for start in range(first, len(self.prompts), size):
            yield self.sampled(range(start, min(start + size, len(self.prompts))), advance)

    def sampled(self, draws: range, advance: Callable[[int], None] = lambda count: None) -> list[SampledPrompt]:
        """The completions of some prompts: a function of the seed, the round, the prompt and the weights."""
        config = self.config
        request = GroupRequest(
            group_size=config.collect.group_size,
            max_completion_tokens=config.sampling.max_completion_tokens,
            sampling=config.sampling.sampling,
            key=StreamKey(config.run.seed, "collect", config.collect.round),
            first_draw=draws.start,
        )
        prompts = self.prompts[draws.start : draws.stop]
        groups = sample_conversations(self.engine, prompts, request, self.workers, advance=advance)
        grades = grade(groups, self.rewards, grading=config.grading, resources=self.resources) if self.rewards else None
        return sampled_prompts(groups, grades)


def replies_of(config: CollectConfig, policy: Policy, opened: ExitStack) -> RepliesOfRun:
    """What replies to the policy, closed with `opened`."""
    settings = ReplySettings(
        environment=config.environment,
        tools=config.tools,
        tools_at=config.tools_at,
        sampling=config.sampling,
        sandbox=config.sandbox,
    )
    if not settings.anyone:
        require_one_turn(config, "sampling")
    return RepliesOfRun(policy, settings, config.model.template_options, opened)


def task_with_room(config: CollectConfig, policy: Policy) -> TaskOptions | Mapping[str, object]:
    """The task's options; if long prompts are left out or cut, with the length that leaves room for an answer."""
    task = config.task
    if not isinstance(task, DatasetOptions) or task.over_long == "error" or task.max_prompt_tokens is not None:
        return task
    left = policy.max_positions - config.sampling.max_completion_tokens
    if left < 1:
        most = f"sampling.max_completion_tokens = {config.sampling.max_completion_tokens}"
        rule = f"leaves no room for a prompt in the model's context of {policy.max_positions}"
        raise UserError(f"task.over_long = {task.over_long}: {most} {rule}.  Lower it, or set task.max_prompt_tokens.")
    return replace(task, max_prompt_tokens=left)


def rewards_of_pairs(
    config: CollectConfig, own: PairObjects, task: Task, environment: RunEnvironment
) -> tuple[RewardFunction, ...]:
    """The caller's rewards and those of the config, or else the task's own; and what an environment's replies earn."""
    given = [
        load_reward(bind(RewardOptions, short_reward(each), where="rewards")) if isinstance(each, str) else each
        for each in own.rewards
    ]
    functions = (*as_reward_functions(given, "rewards"), *(load_reward(item) for item in config.rewards))
    rewards = (*(functions or task_rewards(task)), *([ENVIRONMENT_REWARD] if environment.rewards else []))
    if not rewards:
        raise UserError("rewards: the task has none.  Name one under `rewards`, or set judge.name = llm or person.")
    require_use_for_cache(rewards, config.grading)
    for function in rewards:
        require_enforceable(function, config.grading)
    return with_distinct_names(rewards)
