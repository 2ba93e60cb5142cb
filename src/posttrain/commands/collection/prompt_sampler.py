"""Samples the completions of a collection: prompts in, scored completions out."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from posttrain.commands.collection.pairs import SampledPrompt, sampled_prompts
from posttrain.config import CollectConfig
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import close_engine, load_checked, require_room_for
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import ExportedWeights
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.checkpoint import claim_threads
from posttrain.tasks.base import training_prompts
from posttrain.tasks.task_registry import load_task
from posttrain.training.session import CallerObjects, engine_of, replies_of
from posttrain.training.session_task import rewards_of, task_with_room


class PromptSampler:
    """Samples completions of a collection's prompts, and scores them if the config has rewards; a context manager."""

    def __init__(self, config: CollectConfig, own: CallerObjects) -> None:
        self.config = config
        with ExitStack() as held:
            held.enter_context(claim_threads(config.run.threads))
            self.resources = held.enter_context(Resources(config.sandbox))
            self.policy = own.policy or load_policy(config.model, seed=config.run.seed, inference=True)
            self.policy.require_as_made()
            replies = replies_of(config, own, self.policy, held)
            count, most = config.collect.num_prompts, config.sampling.max_completion_tokens
            options = task_with_room(config, "sampling.max_completion_tokens", most, self.policy.max_positions)
            task = load_task(options, replies.renderer, seed=config.run.seed, prompts_per_step=count, rows=own.rows)
            self.prompts = training_prompts(task, config.collect.round, range(count))
            environment = replies.open(lambda: self.prompts)
            self.workers = environment.workers
            self.rewards: tuple[RewardFunction, ...] = ()
            if config.scored:
                pay = environment.rewards
                self.rewards = rewards_of(config, own.functions, task, self.policy, replies_pay=pay)
            longest = max(len(prompt.tokens) for prompt in self.prompts) + most
            longest = self.policy.max_positions if self.workers else min(longest, self.policy.max_positions)
            self.engine, self.policy = engine_of(config, own, self.policy, longest)
            held.callback(close_engine, self.engine)
            load_checked(self.engine, ExportedWeights(self.policy), 0)
            for prompt in self.prompts:
                require_room_for(prompt, self.engine)
            self._opened = held.pop_all()

    def __enter__(self) -> "PromptSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def batches(self, first: int, advance: Callable[[int], None]) -> Iterator[list[SampledPrompt]]:
        """The completions of all prompts from the draw `first` on, in batches of the size that is decoded together."""
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
        if self.workers is not None:
            self.workers.end_of(groups)
        return sampled_prompts(groups, grades)
