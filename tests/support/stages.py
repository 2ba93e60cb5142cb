"""The two halves of a step, collector and learner, over a task of random prompts for a tiny model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy
from posttrain.options.rollout import RolloutOptions
from posttrain.options.training import UpdateOptions
from posttrain.records import Prompt
from posttrain.rewards.grading.grade import OnError, reward_function
from posttrain.runs.progress import Clock
from posttrain.tasks.base import Task
from posttrain.training.collector import CollectedStep, Collector, CollectorSettings, discard_scores
from posttrain.training.credited_step import CreditedStep
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.metrics import update_metrics
from tests.support.tiny import some_prompts, tiny_policy

PLAIN_DAPO = {"name": "dapo", "overlong": None, "resample": None}
LIMIT = 8


def even_tokens(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    return [float(sum(token % 2 == 0 for token in tokens)) for tokens in completion_ids]


class Tokens(Task):
    """Random prompts, scored by the number of even tokens that follow."""

    name = "tokens"
    reward_functions = (reward_function(even_tokens),)

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        made = some_prompts([3 + draw % 4 for draw in range(draws.stop)], seed=step)
        return [replace(made[draw], id=f"draw {draw}") for draw in draws]

    def held_out(self) -> list[Prompt]:
        return []


@dataclass(frozen=True)
class Stages:
    """What takes the steps of a run of three."""

    collector: Collector
    learner: Learner

    @property
    def policy(self) -> Policy:
        return self.learner.policy

    def collected(self, step: int = 1) -> CollectedStep:
        return self.collector.collect(step, discard_scores, Clock())

    def credited(self, step: int = 1) -> CreditedStep:
        return self.learner.credit(self.collected(step), Clock())

    def learn(self, credited: CreditedStep) -> dict[str, float]:
        """Take the updates; their metrics, and how many there were."""
        self.learner.remember(credited)
        batches = self.learner.batches(credited, Clock())
        reports = self.learner.learn(batches, credited.collected.step, Clock())
        return {**update_metrics(reports), "num_updates": len(reports)}


def stages_with(
    algorithm: Mapping[str, object] | Algorithm = PLAIN_DAPO,
    reward: object = even_tokens,
    *,
    task: Task | None = None,
    policy: Policy | None = None,
    on_error: OnError = "stop",
    temperature: float = 1.0,
    **update: int,
) -> Stages:
    """Five prompts a step, groups of four, completions of up to eight tokens; without a policy a tiny one."""
    policy = tiny_policy() if policy is None else policy
    made = algorithm if isinstance(algorithm, Algorithm) else build_algorithm(algorithm)
    rollout = RolloutOptions(
        prompts_per_step=5, group_size=4, max_completion_tokens=LIMIT, on_reward_error=on_error, temperature=temperature
    )
    collector = Collector(
        task or Tokens(),
        InProcessEngine(policy),
        (reward_function(reward),),
        CollectorSettings(rollout=rollout, resample=made.resample),
    )
    settings = LearnerSettings(
        update=UpdateOptions(learning_rate=1e-2, **update),
        max_completion_tokens=LIMIT,
        temperature=temperature,
        num_steps=3,
    )
    return Stages(collector=collector, learner=Learner(policy, made, settings))
