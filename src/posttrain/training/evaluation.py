"""What a policy can do on held-out problems, with intervals: never the reward of training, never its problems."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float64
from numpy import ndarray

from posttrain.generation.engine import Engine
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.options.grading import GradingOptions
from posttrain.options.sampling import Sampling
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.grade import RewardFunction, grade
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.summary import HELD_OUT
from posttrain.tasks.base import Task

RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked of the policy, and how its answers are judged."""

    prompts: Sequence[Prompt]
    judge: RewardFunction
    """Scores a completion; 1 or more is right."""
    max_completion_tokens: int
    seed: int
    grading: GradingOptions = field(default_factory=GradingOptions)
    resources: Resources | None = None
    """Those of the session, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Completions of the held-out prompts, and which are right."""

    groups: tuple[Group, ...]
    correct: Float64[ndarray, "prompt sample"]
    """1 or 0; NaN where the judge does not apply or could not score, which is neither right nor wrong."""
    outcomes: Mapping[str, float]
    """Share of each outcome that the judge told."""

    @property
    def rates(self) -> Float64[ndarray, " problem"]:
        """Share of right answers for each problem that has a scored one."""
        scored = self.correct[~np.isnan(self.correct).all(axis=1)]
        return np.nanmean(scored, axis=1) if len(scored) else np.empty(0)

    @property
    def num_unscored(self) -> int:
        """Completions that are neither right nor wrong."""
        return int(np.isnan(self.correct).sum())

    @property
    def mean_length(self) -> float:
        """Mean completion length in tokens, the stop token included."""
        return float(np.mean([len(rollout.tokens) for group in self.groups for rollout in group.rollouts]))


def sample_answers(
    engine: Engine,
    questions: Questions,
    *,
    samples: int,
    greedy: bool = False,
    suppressed: tuple[int, ...] = (),
    advance: Advance = lambda count: None,
) -> Answers:
    """Sample every held-out prompt at temperature 1, or greedily, and judge the completions.

    Streams are evaluation's own: the same seed asks every policy with the same uniform numbers.
    """
    request = Request(
        group_size=samples,
        max_completion_tokens=questions.max_completion_tokens,
        sampling=Sampling(greedy=greedy),
        key=StreamKey(questions.seed, "evaluation", 0),
        suppressed=suppressed,
    )
    groups = engine.rollout(questions.prompts, request, advance=advance)
    grades = grade(groups, [questions.judge], grading=questions.grading, resources=questions.resources)
    told = Counter(outcome for rows in grades.outcomes.values() for row in rows for outcome in row if outcome)
    return Answers(
        groups=tuple(groups),
        correct=torch.where(grades.scores[0].isnan(), torch.nan, (grades.scores[0] >= 1).double()).numpy(),
        outcomes={outcome: count / told.total() for outcome, count in sorted(told.items())},
    )


def full_evaluation(
    engine: Engine, task: Task, questions: Questions, *, samples: int, advance: Advance = lambda count: None
) -> tuple[dict[str, object], tuple[Group, ...]]:
    """Every held-out number of summary.json, and the sampled answers that they come from.

    Without held-out problems, or where the judge scores none of them, the numbers are None: nothing was measured.
    """
    unmeasured = dict.fromkeys([*HELD_OUT, *(f"{name}_interval" for name in HELD_OUT), "mean_length"])
    if not questions.prompts:
        return {"num_problems": 0, **unmeasured}, ()
    sampled = sample_answers(engine, questions, samples=samples, advance=advance)
    greedy = sample_answers(engine, questions, samples=1, greedy=True, advance=advance)
    results: dict[str, object] = {
        "num_problems": len(questions.prompts),
        "samples_per_problem": samples,
        "num_unscored": sampled.num_unscored + greedy.num_unscored,
        **unmeasured,
        **measured("accuracy_sampled", sampled.rates),
        **measured("accuracy_greedy", greedy.rates),
        "mean_length": sampled.mean_length,
        "outcomes": dict(sampled.outcomes),
        **task.statistics(sampled.groups),
    }
    forced = never_giving_up(engine, task, questions, advance=advance)
    if forced is not None:
        results["accuracy_never_giving_up"] = forced
    results |= measured("pass_at_8", pass_at_k(sampled.correct, 8))
    return results, sampled.groups


def measured(name: str, values: Float64[ndarray, " problem"]) -> dict[str, object]:
    """A mean over problems with its interval, where there are any."""
    return {name: float(values.mean()), f"{name}_interval": bootstrap_interval(values)} if len(values) else {}


def num_completions(task: Task, questions: Questions, *, samples: int) -> int:
    """Completions that a full evaluation samples."""
    return len(questions.prompts) * (samples + 1 + bool(task.closing_tags))


def brief_evaluation(engine: Engine, questions: Questions, *, problems: int) -> dict[str, float]:
    """Held-out accuracy along the way: one sample for each of the first problems."""
    if not questions.prompts:
        return {}
    answers = sample_answers(engine, replace(questions, prompts=questions.prompts[:problems]), samples=1)
    if not len(answers.rates):
        return {"eval/num_unscored": float(answers.num_unscored)}
    low, high = bootstrap_interval(answers.rates)
    return {
        "eval/accuracy_sampled": float(answers.rates.mean()),
        "eval/accuracy_sampled_low": low,
        "eval/accuracy_sampled_high": high,
        "eval/num_unscored": float(answers.num_unscored),
        "eval/mean_length": answers.mean_length,
        **{f"eval/outcomes/{questions.judge.name}/{name}": share for name, share in answers.outcomes.items()},
    }


def never_giving_up(
    engine: Engine, task: Task, questions: Questions, *, advance: Advance = lambda count: None
) -> float | None:
    """How often the policy finds an answer when it may not stop searching before the token limit.

    Tells learning to search better from learning not to give up.  None where the task cannot say.
    """
    tokenizer = engine.tokenizer
    encoded = [tokenizer.encode(tag, add_special_tokens=False) for tag in task.closing_tags]
    if not questions.prompts or not encoded or any(len(tokens) != 1 for tokens in encoded):
        return None
    closing = [tokens[0] for tokens in encoded]
    answers = sample_answers(engine, questions, samples=1, suppressed=(*closing, *engine.stop_ids), advance=advance)
    return float(np.mean([task.found(group.prompt, group.rollouts[0].text) for group in answers.groups]))


def pass_at_k(correct: Float64[ndarray, "prompt sample"], k: int) -> Float64[ndarray, " measured"]:
    """Unbiased estimate, per problem, of the chance that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k)    n scored samples, c of them right; Chen et al. 2021, arXiv:2107.03374, eq. 1

    Problems with fewer than k scored samples are left out.
    """
    assert k >= 1
    counts = [(int((~np.isnan(row)).sum()), int(np.nansum(row))) for row in correct]
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k])


def bootstrap_interval(values: Float64[ndarray, " problem"]) -> tuple[float, float]:
    """95% percentile interval of the mean over problems, which are what was drawn at random.

    Efron 1979.  Resampling problems, not samples: eight answers to one problem are not eight problems.
    """
    rng = np.random.default_rng(0)
    means = rng.choice(values, size=(RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
