"""Accuracy and reward of a policy on held-out problems, with intervals."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from jaxtyping import Float64
from numpy import ndarray

from posttrain.environments.workers import ReplyWorkers
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Advance, Engine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.options.reward import GradingOptions
from posttrain.options.rollout import SamplingParams
from posttrain.records import Grades, Group, Prompt
from posttrain.rewards.grading.calls import NO_RUN
from posttrain.rewards.grading.function import TrainerState
from posttrain.rewards.grading.grade import OnError, RewardFunction, grade
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.intervals import Interval, score_interval, share_interval
from posttrain.runs.reports import HELD_OUT, REWARD, SCORE, ScoredCompletions
from posttrain.tasks.base import Probe
from posttrain.training.metrics import logged_metrics

LATE = 2**31
"""A step after the end of every weight schedule, so that results before and after are comparable."""
Keep = Callable[[ScoredCompletions], object]
"""Receives all completions of an evaluation with their scores."""
PORTION = 64
"""Number of problems that are sampled and judged at a time, if their results so far are shown."""
NO_PROBES: Mapping[str, Probe] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Held-out problems, and how their answers are judged."""

    task: str = "of no name"
    prompts: Sequence[Prompt]
    judge: RewardFunction
    """Scores a completion; 1 or more is correct."""
    rewards: Sequence[RewardFunction] = ()
    """The rewards of training, also computed for sampled completions; empty: not computed."""
    max_completion_tokens: int
    seed: int
    grading: GradingOptions = field(default_factory=GradingOptions)
    on_error: OnError = "stop"
    """What to do after an exception in the judge or a reward, as in training."""
    resources: Resources | None = None
    trainer_state: TrainerState = NO_RUN
    probes: Mapping[str, Probe] = field(default_factory=dict)
    """More measures of a full evaluation."""
    workers: ReplyWorkers | None = None
    """Workers that call environments, as in training."""
    replies: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Entered with the name of a measurement, so that a run can save replies that are not reproducible."""
    counts: bool = False
    """Whether the judge's scores are known to be counts, so that no score means a correct answer."""
    so_far: Callable[[str], object] | None = None
    """Called with the results so far; the problems are then sampled and judged in portions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Completions of the held-out prompts with their scores."""

    groups: tuple[Group, ...]
    scores: Float64[ndarray, "prompt sample"]
    """The judge's scores; NaN if it does not apply or failed."""
    rewards: Float64[ndarray, "prompt sample"]
    """Summed as in training, with the final weights of schedules; NaN without a score."""
    outcomes: Mapping[str, float]
    """Share of each outcome of the judge."""
    logged: Mapping[str, float]
    """Means of the numbers that reward functions logged, by FUNCTION/NAME."""

    @property
    def correct(self) -> Float64[ndarray, "prompt sample"]:
        """1 or 0; NaN without a score."""
        return np.where(np.isnan(self.scores), np.nan, self.scores >= 1)

    @property
    def counts(self) -> bool:
        """Whether a score is above 1, so that 1 does not mean a correct answer."""
        return bool((self.scores > 1).any())

    @property
    def rates(self) -> Float64[ndarray, " problem"]:
        """Share of correct answers for each problem with a scored answer."""
        return means_of_problems(self.correct)

    @property
    def num_unscored(self) -> int:
        return int(np.isnan(self.correct).sum())

    @property
    def mean_length(self) -> float:
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        return float(np.mean([rollout.num_sampled for rollout in rollouts if not rollout.finish.failed]))


def sample_answers(
    engine: Engine,
    questions: Questions,
    *,
    samples: int | range,
    greedy: bool = False,
    advance: Advance = lambda count: None,
    keep: Keep = lambda completions: None,
) -> Answers:
    """Sample every held-out prompt at temperature 1, or greedily, and judge the completions.

    The same seed gives every policy the same random numbers: `samples` numbers from 0, or those of a range.
    """
    request = evaluation_request(questions, samples=samples, greedy=greedy)
    name = "greedy" if greedy else "more" if request.first_sample else "sampled"
    size = len(questions.prompts) if questions.so_far is None else PORTION
    whole: JudgedGroups | None = None
    for first in range(0, len(questions.prompts), size):
        few = replace(questions, prompts=questions.prompts[first : first + size])
        groups = conversations(engine, few, replace(request, first_draw=first), name, advance)
        part = judged_groups(few, groups, () if greedy else questions.rewards)
        whole = part if whole is None else whole.joined(part)
        if questions.so_far is not None:
            questions.so_far(f"{name}: {whole.says_so_far(questions)}")
    assert whole is not None, "there are problems"
    judge, scores, told = questions.judge, whole.scores, whole.told
    counts = Counter(outcome for row in whole.judged.outcomes.get(judge.name, ()) for outcome in row if outcome)
    earned = torch.full_like(scores, torch.nan) if whole.summed is None else whole.summed.rewards
    grades = replace(told, outcomes={**whole.judged.outcomes, **told.outcomes}, rewards=earned)
    keep(ScoredCompletions(groups=whole.groups, grades=grades, judged=scores, greedy=greedy))
    return Answers(
        groups=whole.groups,
        scores=scores.numpy(),
        rewards=earned.numpy(),
        outcomes={outcome: count / counts.total() for outcome, count in sorted(counts.items())},
        logged={name.removeprefix("logged/"): value for name, value in logged_metrics(told.logged).items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroups:
    """Completions of some held-out prompts, and what the judge and the rewards say of them."""

    groups: tuple[Group, ...]
    judged: Grades
    place: int
    """The judge's, among the functions of `judged`."""
    summed: Grades | None
    """The rewards, if there are any."""

    @property
    def told(self) -> Grades:
        return self.judged if self.summed is None else self.summed

    @property
    def scores(self) -> Float64[torch.Tensor, "prompt sample"]:
        """The judge's scores; NaN if it does not apply or failed."""
        return self.judged.scores[self.place]

    def joined(self, other: "JudgedGroups") -> "JudgedGroups":
        judged = self.judged.joined(other.judged)
        summed = self.summed.joined(other.summed) if self.summed is not None and other.summed is not None else None
        return replace(self, groups=self.groups + other.groups, judged=judged, summed=summed)

    def says_so_far(self, questions: Questions) -> str:
        scores = self.scores[~self.scores.isnan()]
        counts = questions.counts or bool((scores > 1).any())
        shown = "score" if counts else "accuracy"
        value = "unknown" if not len(scores) else f"{(scores if counts else (scores >= 1).double()).mean():.3f}"
        return f"{shown} {value} on {len(self.groups)} problems"


def judged_groups(questions: Questions, groups: Sequence[Group], rewards: Sequence[RewardFunction]) -> JudgedGroups:
    """Judge completions and compute their rewards; a reward that gives the judge's scores is computed once."""

    def graded(functions: Sequence[RewardFunction]) -> Grades:
        return grade(
            groups,
            functions,
            on_error=questions.on_error,
            step=LATE,
            grading=questions.grading,
            resources=questions.resources,
            trainer_state=questions.trainer_state,
        )

    # The rewards that give the judge's scores, before clips and weights.
    judge = questions.judge
    alike = [each.unconditional() == judge and not each.settings.gate and not each.settings.of for each in rewards]
    summed = graded(rewards) if rewards else None
    judged = summed if summed is not None and any(alike) else graded([judge])
    if questions.workers is not None:
        questions.workers.end_of(groups)
    place = alike.index(True) if any(alike) else 0
    return JudgedGroups(groups=tuple(groups), judged=judged, place=place, summed=summed)


def conversations(
    engine: Engine, questions: Questions, request: GroupRequest, name: str, advance: Advance
) -> list[Group]:
    """The completions of one measurement, with environments if training has them."""
    with questions.replies(name):
        return sample_conversations(engine, questions.prompts, request, questions.workers, advance=advance)


def means_of_problems(values: Float64[ndarray, "prompt sample"]) -> Float64[ndarray, " problem"]:
    known = values[~np.isnan(values).all(axis=1)]
    return np.nanmean(known, axis=1) if len(known) else np.empty(0)


def evaluation_request(questions: Questions, *, samples: int | range, greedy: bool = False) -> GroupRequest:
    numbers = samples if isinstance(samples, range) else range(samples)
    return GroupRequest(
        group_size=len(numbers),
        first_sample=numbers.start,
        max_completion_tokens=questions.max_completion_tokens,
        sampling=SamplingParams(greedy=greedy),
        key=StreamKey(questions.seed, "evaluation", 0),
    )


def sources_apart(answers: Answers, questions: Questions) -> dict[str, dict[str, object]]:
    """Results of the sampled answers for each dataset of a mixture."""
    sources = np.array([group.prompt.source for group in answers.groups], dtype=object)
    apart: dict[str, dict[str, object]] = {}
    for source in sorted({*sources} - {""}):
        rates, rewards = means_of_problems(answers.correct[sources == source]), answers.rewards[sources == source]
        apart[source] = {
            "num_problems": int((sources == source).sum()),
            **({} if questions.counts or answers.counts else with_interval("accuracy_sampled", rates)),
            **mean_with_interval(REWARD, rewards),
        }
    return apart


def held_out_metrics(results: Mapping[str, object], probes: Mapping[str, Probe] = NO_PROBES) -> dict[str, float]:
    """Held-out results under their names in docs/metrics.md, with intervals, probes, datasets and logged numbers."""
    readings = [name for probe in probes.values() for name in probe.readings]
    metrics = {f"eval/{name}": cast(float, results[name]) for name in readings if name in results}
    for source, numbers in cast(Mapping[str, Mapping[str, object]], results.get("sources", {})).items():
        for name in ("accuracy_sampled", REWARD):
            if isinstance(value := numbers.get(name), float):
                metrics[f"eval/sources/{source}/{name}"] = value
    for name, value in cast(Mapping[str, float], results.get("logged", {})).items():
        metrics[f"eval/logged/{name}"] = value
    for name in ("mean_length", *HELD_OUT, SCORE, REWARD):
        if results.get(name) is not None:
            metrics[f"eval/{name}"] = cast(float, results[name])
        if interval := cast("Interval | None", results.get(f"{name}_interval")):
            metrics |= {f"eval/{name}_low": interval[0], f"eval/{name}_high": interval[1]}
    return metrics


def with_interval(name: str, rates: Float64[ndarray, " problem"]) -> dict[str, object]:
    return {name: float(rates.mean()), f"{name}_interval": share_interval(rates)} if len(rates) else {}


def mean_with_interval(name: str, scores: Float64[ndarray, "prompt sample"]) -> dict[str, object]:
    means = means_of_problems(scores)
    return {name: float(means.mean()), f"{name}_interval": score_interval(means, scores=scores)} if len(means) else {}


def brief_evaluation(
    engine: Engine, questions: Questions, *, problems: int, keep: Keep = lambda completions: None
) -> dict[str, float]:
    """Held-out accuracy and reward during training: one sample for each of the first problems."""
    if not questions.prompts:
        return {}
    replies = questions.replies
    few = replace(questions, prompts=questions.prompts[:problems], replies=lambda name: replies(f"{name}, brief"))
    answers = sample_answers(engine, few, samples=1, keep=keep)
    results = mean_with_interval(REWARD, answers.rewards)
    if not (questions.counts or answers.counts):
        results |= with_interval("accuracy_sampled", answers.rates)
    elif not questions.rewards:
        results |= mean_with_interval(SCORE, answers.scores)
    results |= {"sources": sources_apart(answers, questions), "logged": answers.logged}
    metrics = {**held_out_metrics(results), "eval/num_unscored": float(answers.num_unscored)}
    if len(answers.rates):
        metrics["eval/mean_length"] = answers.mean_length
        outcomes = answers.outcomes.items()
        metrics |= {f"eval/outcomes/{questions.judge.name}/{name}": share for name, share in outcomes}
    return metrics
