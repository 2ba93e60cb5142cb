"""What a policy can do on held-out problems, with intervals: never the reward of training, never its problems."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float64
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.generation.engine import Engine, sample_groups
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.options.grading import GradingOptions
from posttrain.options.sampling import Sampling
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.grade import OnError, RewardFunction, grade
from posttrain.rewards.grading.resources import Resources
from posttrain.runs.reports import as_number
from posttrain.runs.summary import HELD_OUT
from posttrain.tasks.base import Probe

RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked of the policy, and how its answers are judged."""

    task: str = "of no name"
    """The name of the task that asks, for messages."""
    prompts: Sequence[Prompt]
    judge: RewardFunction
    """Scores a completion; 1 or more is right."""
    max_completion_tokens: int
    seed: int
    grading: GradingOptions = field(default_factory=GradingOptions)
    on_error: OnError = "stop"
    """What an exception of the judge's does, as in training."""
    resources: Resources | None = None
    """Those of the session, if there is one."""
    probes: Mapping[str, Probe] = field(default_factory=dict)
    """What the task has measured besides, in a full evaluation."""


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
    advance: Advance = lambda count: None,
) -> Answers:
    """Sample every held-out prompt at temperature 1, or greedily, and judge the completions.

    Streams are evaluation's own: the same seed asks every policy with the same uniform numbers.
    """
    request = evaluation_request(questions, samples=samples, greedy=greedy)
    groups = sample_groups(engine, questions.prompts, request, advance=advance)
    judge, on_error = questions.judge, questions.on_error
    grades = grade(groups, [judge], on_error=on_error, grading=questions.grading, resources=questions.resources)
    told = Counter(outcome for rows in grades.outcomes.values() for row in rows for outcome in row if outcome)
    return Answers(
        groups=tuple(groups),
        correct=torch.where(grades.scores[0].isnan(), torch.nan, (grades.scores[0] >= 1).double()).numpy(),
        outcomes={outcome: count / told.total() for outcome, count in sorted(told.items())},
    )


def evaluation_request(questions: Questions, *, samples: int, greedy: bool = False) -> Request:
    """What an evaluation samples: with the same uniform numbers of every policy."""
    return Request(
        group_size=samples,
        max_completion_tokens=questions.max_completion_tokens,
        sampling=Sampling(greedy=greedy),
        key=StreamKey(questions.seed, "evaluation", 0),
    )


def full_evaluation(
    engine: Engine, questions: Questions, *, samples: int, advance: Advance = lambda count: None
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
        **with_interval("accuracy_sampled", sampled.rates),
        **with_interval("accuracy_greedy", greedy.rates),
        "mean_length": sampled.mean_length,
        "outcomes": dict(sampled.outcomes),
        **with_interval("pass_at_8", pass_at_k(sampled.correct, 8)),
    }
    for name, probe in questions.probes.items():
        numbers = probe_results(engine, questions, probe, sampled.groups, advance)
        results |= checked_readings(f"task {questions.task}: probe {name!r}", probe, numbers, results)
    return results, sampled.groups


def checked_readings(where: str, probe: Probe, numbers: object, results: Mapping[str, object]) -> Mapping[str, float]:
    """The numbers of a probe: only its readings, of which some may not be defined, and none with a name of ours."""
    if not isinstance(numbers, Mapping):
        raise UserError(f"{where} measured {numbers!r:.60} ({type(numbers).__name__}); give a mapping of its readings")
    taken = sorted(numbers.keys() & results.keys())
    if taken:
        raise UserError(f"{where} gives {', '.join(taken)}, which evaluation has already; name it otherwise")
    unknown = sorted(numbers.keys() - probe.readings.keys(), key=str)
    if unknown:
        raise UserError(
            f"{where} measured {', '.join(map(str, unknown))}, but its readings are"
            f" {', '.join(sorted(probe.readings))}; add what is missing there"
        )
    return {name: finite_reading(f"{where}: {name}", value) for name, value in numbers.items()}


def finite_reading(where: str, value: object) -> float:
    """A probe's value as a number that a summary can hold; numpy's and torch's become floats."""
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise UserError(
            f"{where} = {value!r:.60} ({type(value).__name__}) is no finite number; leave out what is not known"
        )
    return number


def with_interval(name: str, values: Float64[ndarray, " problem"]) -> dict[str, object]:
    """A mean over problems with its interval, where there are any."""
    return {name: float(values.mean()), f"{name}_interval": bootstrap_interval(values)} if len(values) else {}


def num_completions(questions: Questions, *, samples: int) -> int:
    """Completions that a full evaluation samples."""
    return len(questions.prompts) * (samples + 1 + sum(probe.samples_anew for probe in questions.probes.values()))


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


def probe_results(
    engine: Engine, questions: Questions, probe: Probe, sampled: Sequence[Group], advance: Advance
) -> object:
    """What one of the task's probes measured; nothing where its texts are no single tokens of this tokenizer."""
    if not probe.samples_anew:
        return probe.measure(sampled)
    encoded = [engine.tokenizer.encode(text, add_special_tokens=False) for text in probe.suppressed]
    if any(len(tokens) != 1 for tokens in encoded):
        return {}
    suppressed = [tokens[0] for tokens in encoded]
    request = evaluation_request(questions, samples=1)
    request = replace(request, suppressed=(*suppressed, *(engine.stop_ids if probe.endless else ())))
    return probe.measure(sample_groups(engine, questions.prompts, request, advance=advance))


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
