"""The loop of `posttrain sft`, `reward-model` and `dpo`: a batch of rows or pairs, its gradient, an optimiser step."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from posttrain.errors import RunError
from posttrain.models.adapters.in_force import adapter_dropout
from posttrain.records import Preference
from posttrain.runs.folder import interrupted_lines, saved_recipe
from posttrain.runs.harness import Harness, HarnessOptions
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_inputs import RunInputs, require_same_inputs
from posttrain.runs.threads import claim_threads
from posttrain.runs.tracker import require_trackers
from posttrain.training.caller_objects import StartOptions
from posttrain.training.fit_report import plan_lines, preview_lines, summary_of
from posttrain.training.fit_session import FitConfig, FitSession, Item
from posttrain.training.optimizer import apply_gradients, next_rate

PREVIEWED = 2
"""Rows or pairs that a dry run shows."""


def run_fit(
    config: FitConfig,
    inputs: RunInputs,
    start: StartOptions,
    opened: Callable[[], AbstractContextManager[FitSession[Item]]],
) -> Run:
    """A run from its folder to its summary; `opened` loads the model and reads rows or pairs."""
    require_trackers(config.run.report_to, config.tracker)
    path = Path(config.run.folder)
    if start.resume:
        inputs = require_same_inputs(path, inputs, accept_changes=start.accept_changes)
    with claim_threads(config.run.threads) as threads, opened() as session:
        if start.resume:
            folder = RunFolder.resume(path)
        else:
            folder = RunFolder.create(path, saved_recipe(config), overwrite=config.run.overwrite)
        with Harness(folder, session.trained, harness_options(session, start)) as harness:
            notes = [*(harness.resume(threads) if start.resume else []), *inputs.notes]
            folder.write_inputs(inputs)
            folder.write_tokenizer(session.trained.policy.tokenizer)
            harness.start([*plan_lines(session), *notes])
            return fit(session, harness)


def harness_options(session: FitSession[Item], start: StartOptions) -> HarnessOptions:
    return HarnessOptions(
        run=replace(session.config.run, num_steps=session.num_steps),
        checkpoint=session.config.checkpoint,
        time_by_stage=session.objective.by_stage,
        watchers=start.watchers,
        score=session.objective.score,
        config=session.config,
        from_step=start.from_step,
        kept_from={"metrics.jsonl": 1},
    )


def fit(session: FitSession[Item], harness: Harness) -> Run:
    """Take the remaining steps, then measure, save and report the results."""
    objective, trained, folder = session.objective, session.trained, harness.folder
    if not trained.step:
        objective.begin(harness)
        metrics = objective.evaluate(harness, full=True)
        folder.append_metrics(0, metrics)
        harness.progress.compare_with(metrics)
    with harness.naming_the_step():
        for step in harness.steps():
            harness.record(take_step(session, harness, step))
    if harness.interruption and trained.step < session.num_steps:
        harness.end({}, interrupted_lines(folder.path, trained.step, harness.interruption.reason, harness.command))
        return Run(folder=folder.path, summary={}, interrupted=True)
    return conclude(session, harness)


def take_step(session: FitSession[Item], harness: Harness, step: int) -> StepReport:
    """One step: a batch, its update, and a measurement if one is due."""
    objective, run = session.objective, session.trained.run
    report = objective.before_step(step, harness)
    tokens = run.num_tokens
    with harness.clock("update"):
        batch, metrics = learn(session, step)
    if objective.is_due(step, session.num_steps):
        metrics |= objective.evaluate(harness, full=False)
    return replace(
        report,
        metrics={**report.metrics, **metrics},
        num_tokens=report.num_tokens + run.num_tokens - tokens,
        pairs=[each for each in batch if isinstance(each, Preference)],
    )


def learn(session: FitSession[Item], step: int) -> tuple[Sequence[Item], dict[str, float]]:
    """Take one optimiser step on the next batch unless it is empty; returns the batch and its metrics."""
    objective, trained, options = session.objective, session.trained, session.objective.options
    run = trained.run
    run.step = step
    rate = next_rate(options, trained.own_optimizer, step - 1, session.num_steps)
    batch = session.source.batch(run.first, options)
    if not batch:
        return batch, {**objective.counted(batch), "learning_rate": rate}
    trained.optimizer.zero_grad(set_to_none=True)
    with adapter_dropout(trained.policy.model, session.config.run.seed, step):
        metrics = objective.accumulate(batch)
    grad_norm = math.hypot(*apply_gradients(trained.optimizer, rate, options.max_grad_norm).values())
    if not math.isfinite(grad_norm):
        remedy = f"No step was taken.  Start again with a lower {options.section}.learning_rate."
        raise RunError(f"loss {metrics['loss']}, gradient norm {grad_norm}.  {remedy}")
    run.count(len(batch), objective.num_tokens(batch))
    counted = {**objective.counted(batch), "num_tokens": float(run.num_tokens)}
    return batch, {**metrics, "grad_norm": grad_norm, "learning_rate": rate, **counted}


def conclude(session: FitSession[Item], harness: Harness) -> Run:
    """Measure the trained policy, save it, and report the results."""
    objective, trained, folder = session.objective, session.trained, harness.folder
    if objective.measures_at_end or not objective.is_due(trained.step, session.num_steps):
        if metrics := objective.evaluate(harness, full=True):
            folder.append_metrics(trained.step, metrics)
        trained.add_seconds(harness.clock.seconds)
    summary = summary_of(session)
    objective.save(folder)
    harness.end(summary, objective.result_lines(folder.path))
    return Run(folder=folder.path, summary=summary)


def show_plan(config: FitConfig, opened: Callable[[], AbstractContextManager[FitSession[Item]]]) -> None:
    with claim_threads(config.run.threads), opened() as session:
        objective = session.objective
        rehearsed = objective.rehearse()
        batch, began = session.source.batch(0, objective.options), perf_counter()
        lines = [*plan_lines(session), *rehearsed]
        if batch:
            objective.accumulate(batch)
            seconds = perf_counter() - began
            lines.append(f"time       about {seconds * session.num_steps / 60:.1f} min: {seconds:.2f} s a step")
            lines += preview_lines(objective, batch[:PREVIEWED])
        print("\n".join(lines))
