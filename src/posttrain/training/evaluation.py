"""What a policy can do on held-out problems, with intervals: never the reward of training, never its problems."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from posttrain.generation.engine import Engine
from posttrain.generation.request import Request
from posttrain.generation.sampling_options import Sampling
from posttrain.generation.streams import StreamKey
from posttrain.records import Group, Prompt
from posttrain.rewards.grading_options import GradingOptions
from posttrain.rewards.protocol import RewardFunction, grade
from posttrain.tasks.base import Task
from posttrain.training.summary import HELD_OUT

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Completions of the held-out prompts, and which are right."""

    groups: tuple[Group, ...]
    correct: Float64[ndarray, "prompt sample"]
    outcomes: Mapping[str, float]
    """Share of each outcome that the judge told."""

    @property
    def mean_length(self) -> float:
        """Mean completion length in tokens, the stop token included."""
        return float(np.mean([len(rollout.tokens) for group in self.groups for rollout in group.rollouts]))


def ask(
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
    grades = grade(groups, [questions.judge], grading=questions.grading)
    told = Counter(outcome for rows in grades.outcomes.values() for row in rows for outcome in row if outcome)
    return Answers(
        groups=tuple(groups),
        correct=(grades.scores[0] >= 1).double().numpy(),
        outcomes={outcome: count / told.total() for outcome, count in sorted(told.items())},
    )


def full_evaluation(
    engine: Engine, task: Task, questions: Questions, *, samples: int, advance: Advance = lambda count: None
) -> tuple[dict[str, object], tuple[Group, ...]]:
    """Every held-out number of summary.json, and the sampled answers that they come from.

    Without held-out problems the numbers are None: nothing was measured.
    """
    if not questions.prompts:
        unmeasured = dict.fromkeys([*HELD_OUT, *(f"{name}_interval" for name in HELD_OUT), "mean_length"])
        return {"num_problems": 0, **unmeasured}, ()
    sampled = ask(engine, questions, samples=samples, advance=advance)
    greedy = ask(engine, questions, samples=1, greedy=True, advance=advance)
    rates = sampled.correct.mean(axis=1)
    results: dict[str, object] = {
        "num_problems": len(questions.prompts),
        "samples_per_problem": samples,
        "accuracy_sampled": float(rates.mean()),
        "accuracy_sampled_interval": bootstrap_interval(rates),
        "accuracy_greedy": float(greedy.correct.mean()),
        "accuracy_greedy_interval": bootstrap_interval(greedy.correct[:, 0]),
        "pass_at_8": None,
        "pass_at_8_interval": None,
        "mean_length": sampled.mean_length,
        "outcomes": dict(sampled.outcomes),
        **task.statistics(sampled.groups),
    }
    forced = never_giving_up(engine, task, questions, advance=advance)
    if forced is not None:
        results["accuracy_never_giving_up"] = forced
    if samples >= 8:
        solved = pass_at_k(sampled.correct, 8)
        results |= {"pass_at_8": float(solved.mean()), "pass_at_8_interval": bootstrap_interval(solved)}
    return results, sampled.groups


def num_completions(task: Task, questions: Questions, *, samples: int) -> int:
    """Completions that a full evaluation samples."""
    return len(questions.prompts) * (samples + 1 + bool(task.closing_tags))


def brief_evaluation(engine: Engine, questions: Questions, *, problems: int) -> dict[str, float]:
    """Held-out accuracy along the way: one sample for each of the first problems."""
    if not questions.prompts:
        return {}
    answers = ask(engine, replace(questions, prompts=questions.prompts[:problems]), samples=1)
    low, high = bootstrap_interval(answers.correct[:, 0])
    return {
        "eval/accuracy_sampled": float(answers.correct.mean()),
        "eval/accuracy_sampled_low": low,
        "eval/accuracy_sampled_high": high,
        "eval/mean_length": answers.mean_length,
        **{f"eval/outcomes/{questions.judge.name}/{name}": share for name, share in answers.outcomes.items()},
    }


def never_giving_up(
    engine: Engine, task: Task, questions: Questions, *, advance: Advance = lambda count: None
) -> float | None:
    """How often the policy finds an answer when it may not stop searching before the token limit.

    Tells learning to search better from learning not to give up.  None where the task cannot say.
    """
    tokenizer = engine.policy.tokenizer
    encoded = [tokenizer.encode(tag, add_special_tokens=False) for tag in task.closing_tags]
    if not questions.prompts or not encoded or any(len(tokens) != 1 for tokens in encoded):
        return None
    closing = [tokens[0] for tokens in encoded]
    answers = ask(engine, questions, samples=1, suppressed=(*closing, *engine.policy.stop_ids), advance=advance)
    return float(np.mean([task.found(group.prompt, group.rollouts[0].text) for group in answers.groups]))


def pass_at_k(correct: Float64[ndarray, "prompt sample"], k: int) -> Float64[ndarray, " prompt"]:
    """Unbiased estimate, per problem, of the chance that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k)    n samples, c of them right; Chen et al. 2021, arXiv:2107.03374, eq. 1
    """
    n = correct.shape[1]
    assert 1 <= k <= n
    return np.array([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct.sum(axis=1)])


def bootstrap_interval(values: Float64[ndarray, " problem"]) -> tuple[float, float]:
    """95% percentile interval of the mean over problems, which are what was drawn at random.

    Efron 1979.  Resampling problems, not samples: eight answers to one problem are not eight problems.
    """
    rng = np.random.default_rng(0)
    means = rng.choice(values, size=(RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
