"""The full evaluation before and after training: accuracies with intervals, pass@8, the task's probes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.generation.engine import Advance, Engine
from posttrain.options.training import EvaluationOptions
from posttrain.records import Group
from posttrain.runs.reports import HELD_OUT, LEFT_OUT, REWARD, SCORE, as_number
from posttrain.tasks.base import Probe
from posttrain.training.evaluation import (
    Answers,
    Keep,
    Questions,
    conversations,
    evaluation_request,
    mean_with_interval,
    sample_answers,
    sources_apart,
    with_interval,
)

PASS_K = 8
"""k of pass@k."""


def full_evaluation(
    engine: Engine,
    questions: Questions,
    options: EvaluationOptions,
    *,
    advance: Advance = lambda count: None,
    keep: Keep = lambda completions: None,
) -> tuple[dict[str, object], tuple[Group, ...]]:
    """The held-out results of summary.json and the sampled answers; None for results that could not be measured."""
    names = (*HELD_OUT, REWARD)
    unmeasured = dict.fromkeys([*names, *(f"{name}_interval" for name in names), "mean_length"])
    if not questions.prompts:
        return {"num_problems": 0, **unmeasured}, ()
    sampled = sample_answers(engine, questions, samples=options.samples, advance=advance, keep=keep)
    eight = eight_answers(engine, questions, options, sampled, advance, keep)
    greedy = sample_answers(engine, questions, samples=1, greedy=True, advance=advance, keep=keep)
    results: dict[str, object] = {
        "num_problems": len(questions.prompts),
        "samples_per_problem": options.samples,
        "num_unscored": sampled.num_unscored + greedy.num_unscored,
        **unmeasured,
        **accuracies(sampled, greedy, eight, questions),
        **mean_with_interval(REWARD, sampled.rewards),
        "mean_length": sampled.mean_length,
        "outcomes": dict(sampled.outcomes),
        **({"sources": by_source} if (by_source := sources_apart(sampled, questions)) else {}),
        **({"logged": dict(sampled.logged)} if sampled.logged else {}),
    }
    measured_on = {
        **dict.fromkeys(("accuracy_sampled", REWARD), sample_size(sampled.groups)),
        "accuracy_greedy": sample_size(greedy.groups),
        "pass_at_8": {"problems": len(eight), "completions": 8 * len(eight)},
    }
    for name, probe in questions.probes.items():
        groups = greedy.groups if probe.greedy else sampled.groups
        if probe.samples_anew:
            sampled_anew = probe_answers(engine, questions, options, name, advance)
            if sampled_anew is None:
                continue
            groups = sampled_anew
        numbers = probe.measure(groups)
        if questions.workers is not None:
            questions.workers.end_of(groups)
        readings = checked_readings(f"task {questions.task}: probe {name!r}", probe, numbers, results)
        measured_on |= dict.fromkeys(readings, sample_size(groups))
        results |= readings
    known = {name: size for name, size in measured_on.items() if results.get(name) is not None}
    return results | {"measured_on": known}, sampled.groups


def sample_size(groups: Sequence[Group]) -> dict[str, int]:
    """The problems and completions that a number rests on."""
    return {"problems": len(groups), "completions": sum(len(group.rollouts) for group in groups)}


def eight_answers(
    engine: Engine, questions: Questions, options: EvaluationOptions, sampled: Answers, advance: Advance, keep: Keep
) -> Float64[ndarray, "problem sample"]:
    """Which of 8 or more samples are right, for `pass_at_8_problems`, or for all problems if all have as many."""
    if options.samples >= PASS_K:
        return sampled.correct
    few = questions.prompts[: options.pass_at_8_problems]
    if not few or questions.counts or sampled.counts:
        return np.empty((0, PASS_K))
    more = range(options.samples, PASS_K)
    asked = replace(questions, prompts=few, rewards=())
    others = sample_answers(engine, asked, samples=more, advance=advance, keep=keep)
    return np.concatenate([sampled.correct[: len(few)], others.correct], axis=1)


def probe_answers(
    engine: Engine, questions: Questions, options: EvaluationOptions, name: str, advance: Advance
) -> tuple[Group, ...] | None:
    """A completion for each of `probe_problems` without the suppressed texts; None if these are not single tokens."""
    probe = questions.probes[name]
    encoded = [engine.tokenizer.encode(text, add_special_tokens=False) for text in probe.suppressed]
    if any(len(tokens) != 1 for tokens in encoded):
        return None
    suppressed = (*(tokens[0] for tokens in encoded), *(engine.stop_ids if probe.endless else ()))
    request = replace(evaluation_request(questions, samples=1), suppressed=suppressed)
    few = replace(questions, prompts=questions.prompts[: options.probe_problems])
    return tuple(conversations(engine, few, request, name, advance))


def accuracies(
    sampled: Answers, greedy: Answers, eight: Float64[ndarray, "problem sample"], questions: Questions
) -> dict[str, object]:
    if questions.counts or sampled.counts or greedy.counts:
        scores = {} if questions.rewards else mean_with_interval(SCORE, sampled.scores)
        return {LEFT_OUT: "left out: a score is above 1, so 1 does not mean a correct answer", **scores}
    return {
        **with_interval("accuracy_sampled", sampled.rates),
        **with_interval("accuracy_greedy", greedy.rates),
        **with_interval("pass_at_8", pass_at_k(eight, PASS_K)),
    }


def num_completions(questions: Questions, options: EvaluationOptions) -> int:
    """Completions of a full evaluation."""
    problems = len(questions.prompts)
    more = max(PASS_K - options.samples, 0) * min(options.pass_at_8_problems, problems)
    probes = sum(probe.samples_anew for probe in questions.probes.values()) * min(options.probe_problems, problems)
    return problems * (options.samples + 1) + more + probes


def completions_of_run(questions: Questions, options: EvaluationOptions, num_steps: int) -> int:
    times = num_steps // options.every_steps if options.every_steps else 0
    brief = min(options.brief_problems, len(questions.prompts))
    return 2 * num_completions(questions, options) + times * brief


def checked_readings(where: str, probe: Probe, numbers: object, results: Mapping[str, object]) -> Mapping[str, float]:
    """The numbers of a probe: each must be one of its readings, and not a result of the evaluation itself."""
    if not isinstance(numbers, Mapping):
        raise UserError(
            f"{where} returned {numbers!r:.60} ({type(numbers).__name__}).  Return a mapping of its readings"
        )
    if taken := sorted(numbers.keys() & results.keys()):
        raise UserError(f"{where} returned {', '.join(taken)}, which evaluations already have.  Use another name")
    if unknown := ", ".join(sorted(map(str, numbers.keys() - probe.readings.keys()))):
        readings = ", ".join(sorted(probe.readings))
        raise UserError(f"{where} returned {unknown}, but its readings are {readings}.  Add the missing ones there")
    found: dict[str, float] = {}
    for name, value in numbers.items():
        number, kind = as_number(value), type(value).__name__
        if number is None or not math.isfinite(number):
            unknown = "is not a finite number.  Leave out unknown values"
            raise UserError(f"{where}: {name} = {value!r:.60} ({kind}) {unknown}")
        found[name] = number
    return found


def pass_at_k(correct: Float64[ndarray, "prompt sample"], k: int) -> Float64[ndarray, " measured"]:
    """Unbiased estimate, per problem, of the probability that at least one of k samples is correct.

    1 - C(n - c, k) / C(n, k)    n scored samples, c of them right; Chen et al. 2021, arXiv:2107.03374, eq. 1

    Problems with fewer than k scored samples are left out.
    """
    assert k >= 1
    counts = [(int((~np.isnan(row)).sum()), int(np.nansum(row))) for row in correct]
    return np.array([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k])
