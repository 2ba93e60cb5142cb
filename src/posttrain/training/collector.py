"""The first half of a step: prompts → rollouts → grades, with dynamic sampling if the algorithm uses it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from posttrain.algorithms.advantages import sums_differ
from posttrain.algorithms.algorithm import Resample
from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.conversations import failure_name, require_few_failures, sample_conversations
from posttrain.generation.engine import Engine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.options.reward import GradingOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.records import Grades, Group, Prompt
from posttrain.rewards.grading.dispatch import UnscoredRows
from posttrain.rewards.grading.function import RewardFunction, TrainerState
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.progress import Clock
from posttrain.tasks.base import Task, training_prompts

Journal = Callable[[int, Sequence[Group], Grades], None]
"""Function of (step, groups, grades) that receives every score before it is used."""


def discard_scores(step: int, groups: Sequence[Group], grades: Grades) -> None:
    """Do not save scores, outside a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorSettings:
    """Collector settings from the recipe."""

    rollout: RolloutOptions
    grading: GradingOptions = field(default_factory=GradingOptions)
    seed: int = 0
    resample: Resample | None = None
    informative: Callable[[Grades], Tensor] = sums_differ
    """Which groups dynamic sampling keeps."""
    num_steps: int = 0
    """Number of steps of the whole run, for rewards."""
    num_rows: int = 0
    """Number of training rows that prompts are read from; 0 if they are generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedStep:
    """The groups that a step trains on, with their grades."""

    step: int
    groups: Sequence[Group]
    grades: Grades
    replaced: Sequence[tuple[Sequence[Group], Grades]] = ()
    """Groups that dynamic sampling replaced, round by round; logged, not trained on."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_completion_tokens(self) -> int:
        return completion_tokens(self.groups)

    @property
    def sampled(self) -> list[Group]:
        """All groups, replaced ones included."""
        return [*self.groups, *(group for groups, _ in self.replaced for group in groups)]

    @property
    def num_sampled_tokens(self) -> int:
        return completion_tokens(self.sampled)


def completion_tokens(groups: Sequence[Group]) -> int:
    return sum(rollout.num_sampled for group in groups for rollout in group.rollouts)


class Collector:
    """Gets prompts from a task, completions from an engine, and grades from rewards."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        rewards: Sequence[RewardFunction],
        settings: CollectorSettings,
        *,
        resources: Resources | None = None,
        workers: ReplyWorkers | None = None,
    ) -> None:
        """`workers` call the environments of completions; without them, a completion has one turn."""
        self.task, self.engine, self.rewards, self.settings = task, engine, tuple(rewards), settings
        self.resources, self.workers = resources, workers
        self.unscored = UnscoredRows(settings.grading.on_unscored_row)

    def close(self) -> None:
        """The run has ended."""

    def collect(self, step: int, journal: Journal, clock: Clock) -> CollectedStep:
        """The groups of a step; dynamic sampling replaces uninformative groups by groups of other prompts.

        Groups that are uninformative after the last round stay, so that a step always has its full number.
        """
        groups, grades = self._sampled(step, range(self.settings.rollout.prompts_per_step), journal, clock)
        replaced: list[tuple[Sequence[Group], Grades]] = []
        drawn, resample = len(groups), self.settings.resample
        for _ in range(0 if resample is None else resample.max_rounds):
            keep = self.settings.informative(grades)
            missing = int((~keep).sum())
            if missing == 0:
                break
            new_groups, new_grades = self._sampled(step, range(drawn, drawn + missing), journal, clock)
            drawn += missing
            out, kept = (~keep).nonzero().flatten().tolist(), keep.nonzero().flatten().tolist()
            replaced.append(([groups[i] for i in out], grades.select(out)))
            groups = [groups[i] for i in kept] + new_groups
            grades = grades.select(kept).joined(new_grades)
        collected = CollectedStep(step=step, groups=groups, grades=grades, replaced=replaced)
        if self.workers is not None:  # over all rounds, each of which was looked at by itself
            sampled, key = collected.sampled, self.request(step).key
            failures = {
                failure_name(key, group.prompt, group.draw, rollout.sample): rollout.failure
                for group in sampled
                for rollout in group.rollouts
                if rollout.finish.failed
            }
            require_few_failures(self.workers, failures, sum(len(group.rollouts) for group in sampled))
        return collected

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        return training_prompts(self.task, step, draws)

    def request(self, step: int, *, first_draw: int = 0, purpose: str = "rollout") -> GroupRequest:
        options = self.settings.rollout
        return GroupRequest(
            group_size=options.group_size,
            max_completion_tokens=options.max_completion_tokens,
            sampling=options.sampling,
            keep_alternatives=options.keep_alternatives,
            key=StreamKey(self.settings.seed, purpose, step),
            first_draw=first_draw,
        )

    def grade(self, groups: Sequence[Group], *, step: int = 1, journal: Journal = discard_scores) -> Grades:
        return grade(
            groups,
            self.rewards,
            on_error=self.settings.rollout.on_reward_error,
            journal=lambda groups, grades: journal(step, groups, grades),
            step=step,
            grading=self.settings.grading,
            resources=self.resources,
            trainer_state=self.trainer_state(step),
        )

    def trainer_state(self, step: int) -> TrainerState:
        done, rows = step - 1, self.settings.num_rows
        epoch = done * self.settings.rollout.prompts_per_step / rows if rows else None
        return TrainerState(global_step=done, max_steps=self.settings.num_steps, epoch=epoch)

    def _sampled(self, step: int, draws: range, journal: Journal, clock: Clock) -> tuple[list[Group], Grades]:
        with clock("rollout"):
            request = self.request(step, first_draw=draws.start)
            prompts = self.prompts(step, draws)
            groups = sample_conversations(self.engine, prompts, request, self.workers)
        with clock("grade"):
            grades = self.grade(groups, step=step, journal=journal)
        if self.workers is not None:
            self.workers.end_of(groups)
        self.unscored.look_at(groups, grades)
        return groups, grades
