"""Held-out problems of a run: full and brief evaluations, as metrics and as the final table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Literal, cast

from posttrain.algorithms.algorithm import Algorithm
from posttrain.config import Config
from posttrain.environments.protocol import Own
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.runs.harness import Harness
from posttrain.runs.progress import Clock, Progress
from posttrain.runs.reports import (
    HELD_OUT,
    REWARD,
    SCORE,
    EvaluationReport,
    ScoredCompletions,
    headline,
    problems_suffix,
)
from posttrain.tasks.base import Probe, Reading, Task
from posttrain.tasks.dataset import Rows
from posttrain.training.evaluation import Questions, brief_evaluation
from posttrain.training.full_evaluation import full_evaluation, num_completions
from posttrain.training.session import CallerObjects, Rewards, Session, Tools, open_session

SHOWN = 3
"""Number of held-out problems whose completions are shown before and after."""
COLUMN = 46
"""Characters of a transcript's column."""
NOTHING_HELD_OUT = "No rows were held out, so there are no results before and after training."
ACCURACIES = {
    "accuracy_sampled": Reading("accuracy, sampled at temperature 1"),
    "accuracy_greedy": Reading("accuracy, greedy"),
    "pass_at_8": Reading("pass@8"),
}
Row = tuple[str, str, str]
"""The held-out problems, and their results before and after training."""


def measure_in_full(
    session: Session, harness: Harness, questions: Questions, *, step: int, when: Literal["before", "after"]
) -> tuple[dict[str, object], list[list[str]]]:
    """The full evaluation, and [prompt, first completion] of the problems shown at the end."""
    options, kept = session.config.evaluation, list[ScoredCompletions]()
    total = num_completions(questions, options)
    with harness.progress.stage(f"held-out problems {when} training", total) as advance:
        results, groups = full_evaluation(session.engine, questions, options, advance=advance, keep=kept.append)
        if when == "before":  # the one after training takes about as long
            harness.progress.closing_seconds = advance.seconds
    harness.evaluated(EvaluationReport(step=step, results=results, groups=groups, evaluation=when, completions=kept))
    first = {group.prompt.text: group for group in reversed(groups)}  # the first group of a repeated prompt
    shown = [first[text] for text in dict.fromkeys(group.prompt.text for group in groups)][:SHOWN]
    return results, [[group.prompt.text, group.graded_text(group.rollouts[0])] for group in shown]


def measure_in_brief(session: Session, harness: Harness, questions: Questions, *, step: int) -> dict[str, float]:
    kept: list[ScoredCompletions] = []
    with harness.clock("evaluate"):
        problems = session.config.evaluation.brief_problems
        metrics = brief_evaluation(session.engine, questions, problems=problems, keep=kept.append)
        harness.evaluated(EvaluationReport(step=step, results=metrics, completions=kept))
    return metrics


def evaluate_when_due(session: Session, harness: Harness) -> Mapping[str, float]:
    """A brief evaluation every `evaluation.every_steps` steps."""
    every, state = session.config.evaluation.every_steps, session.trained.run
    if not every or state.step % every:
        return {}
    metrics = measure_in_brief(session, harness, session.questions_now(), step=state.step)
    if (score := held_out_score(metrics)) is not None:
        state.saw_evaluation(score)
    return metrics


def held_out_score(metrics: Mapping[str, float]) -> float | None:
    """Decides which checkpoint is the best and when to stop early: held-out accuracy, else score or reward."""
    found = headline(metrics, "eval/")
    return None if found is None else found[1]


def measure(
    session: Session, harness: Harness, when: Literal["before", "after"]
) -> tuple[dict[str, object], list[list[str]]]:
    """The full evaluation with its seconds, saved in the run's state if it is before training; and transcripts."""
    clock, state = Clock(), session.trained.run
    with clock("evaluate"):
        results, transcripts = measure_in_full(session, harness, session.questions_now(), step=state.step, when=when)
    if when == "before":
        state.before, state.seconds = results, {}
    state.add_seconds(clock.seconds)
    return results, transcripts


def comparison(summary: Mapping[str, object], probes: Iterable[Probe] = ()) -> list[Row]:
    """The held-out results, probes last, also for each dataset of a mixture.

    The reward is shown unless it equals the accuracy.  Accuracies are shown if the two are equal, or if any answer was
    correct.
    """
    before, after = (cast(Mapping[str, object], summary[when]) for when in ("before", "after"))
    same = all(each.get(REWARD) in (None, each["accuracy_sampled"]) for each in (before, after))
    right = any(each[name] for each in (before, after) for name in HELD_OUT)
    readings = {
        SCORE: Reading("score, sampled at temperature 1"),
        **({} if same else {REWARD: Reading("reward, sampled at temperature 1")}),
        **(ACCURACIES if same or right else {}),
        "mean_length": Reading("mean length, tokens", digits=1),
        **{name: reading for probe in probes for name, reading in probe.readings.items()},
    }
    sources = [cast(Mapping[str, Mapping[str, object]], each.get("sources", {})) for each in (before, after)]
    parts = [(f"{source}: ", first, sources[1][source]) for source, first in sources[0].items() if source in sources[1]]
    return [
        (
            prefix + reading.label + problems_suffix(first, name),
            result_text(first, name, reading),
            result_text(last, name, reading),
        )
        for prefix, first, last in [("", before, after), *parts]
        for name, reading in readings.items()
        if first.get(name) is not None and last.get(name) is not None
    ]


def result_text(results: Mapping[str, object], name: str, reading: Reading) -> str:
    interval = cast("Sequence[float] | None", results.get(f"{name}_interval"))
    text = f"{cast(float, results[name]):.{reading.digits}f}"
    return f"{text} [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else text


def table_lines(rows: Sequence[Row], title: str = "held-out") -> list[str]:
    wide = max([37, *(len(label) for label, _, _ in rows)]) + 1
    width = max([23, *(len(left) for _, left, _ in rows)]) + 1
    return [f"{label:<{wide}}{left:<{width}}{right}" for label, left, right in [(title, "before", "after"), *rows]]


def transcript_lines(before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]) -> list[str]:
    """The completions of problems that both have, in two columns."""
    last = {each[0]: each[1] for each in after}
    both = {prompt: text for prompt, text in before if prompt in last}
    lines: list[str] = []
    for prompt, text in both.items():
        left, right = (
            [piece for line in each.split("\n") for piece in (wrap(line, COLUMN, drop_whitespace=False) or [""])]
            for each in (text, last[prompt])
        )
        body = [f"  {a:<{COLUMN}} | {b}" for a, b in zip_longest(left, right, fillvalue="")]
        lines += [prompt.strip(), f"  {'before':<{COLUMN}} | after", *body, ""]
    return lines


def evaluate(
    model: str | Path | None = None,
    config: Config | None = None,
    *,
    policy: Policy | None = None,
    task: Task | None = None,
    engine: Engine | None = None,
    algorithm: Algorithm | None = None,
    rewards: Rewards = (),
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    environment: Own = None,
    tools: Tools = (),
    progress: Progress | None = None,
) -> dict[str, object]:
    """Evaluate a model on held-out problems, with 95% intervals, as `posttrain eval` does.

    The model is a folder, or an object given as `policy`; the config's model is ignored.  The config gives the task and
    the number of samples.  The objects are those of `posttrain.train`; the algorithm does not affect results.
    """
    if (model is None) == (policy is None):
        given = "no model is given" if model is None else f"model = {model} and a policy object are both given"
        raise UserError(f"evaluate: {given}.  Give either the folder of a model or policy=.")
    config = config or Config()
    if model is not None:
        config = replace(config, model=replace(config.model, path=str(model)))
    caller = CallerObjects(
        policy=policy,
        task=task,
        engine=engine,
        algorithm=algorithm,
        rewards=rewards,
        rows=rows,
        held_out_rows=held_out_rows,
        environment=environment,
        tools=tools,
    )
    with open_session(config, caller, inference=True) as session:
        session.load_weights()
        questions, options = session.questions(), config.evaluation
        if not questions.prompts:
            raise UserError(
                f"evaluate: {session.task.name} does not have held-out problems.  For a dataset set"
                " task.held_out_share, such as 0.1, or task.held_out_path."
            )
        if config.rewards:  # computed also if the task has its caller measure, which judges
            questions = replace(questions, rewards=session.rewards)
        if progress is None:
            return full_evaluation(session.engine, questions, options)[0]
        total = num_completions(questions, options)
        with progress.stage("completions of held-out problems", total) as advance:
            questions = replace(questions, so_far=lambda results: advance(0, results))
            return full_evaluation(session.engine, questions, options, advance=advance)[0]
