"""The loop: prompts → rollouts → grades → advantages → batch → update, as often as the recipe says."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

from posttrain.batch import Batch, collate
from posttrain.config import Config, as_recipe, build
from posttrain.config.recipes import RecipeLayer, parse_yaml
from posttrain.errors import RunError, UserError
from posttrain.options.training import CheckpointOptions
from posttrain.runs import checkpoint
from posttrain.runs.alarms import Line, alarms, transcript
from posttrain.runs.clock import Clock
from posttrain.runs.folder import RunFolder, new_folder
from posttrain.runs.interruption import interruptible
from posttrain.runs.progress import Progress
from posttrain.training import report
from posttrain.training.collector import Collected, StepContext, collect
from posttrain.training.evaluation import brief_evaluation, full_evaluation, num_completions
from posttrain.training.metrics import step_metrics, step_tokens
from posttrain.training.optimizer import learning_rate
from posttrain.training.session import Rewards, Rows, Session, frozen_copy, open_session, require_room
from posttrain.training.state import RunState, restore, save_checkpoint
from posttrain.training.update import Objective, update

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished, or interrupted, run."""

    folder: Path
    summary: dict[str, object]
    """The content of summary.json; empty where the run was interrupted."""
    interrupted: bool = False

    @property
    def model_folder(self) -> Path:
        """The trained model, for `from_pretrained` and for `posttrain chat`."""
        return self.folder / "model"


def train(
    config: Config,
    *,
    rewards: Rewards = (),
    rows: Rows | None = None,
    resume: bool = False,
) -> Run:
    """Improve a policy by sampling, grading and reinforcing its own completions.

    `rewards` are functions of your own and `rows` your own prompts, for callers in Python.  With `resume` the run
    in `config.run.folder` goes on from its last checkpoint, to the same bits as if it had never stopped.
    """
    with open_session(config, rewards=rewards, rows=rows) as session:
        return train_session(session, resume=resume)


def train_session(session: Session, *, resume: bool) -> Run:
    """The run of a session, from its folder to its summary."""
    require_room(session)
    config, options = session.config, session.config.run
    if resume:
        folder = RunFolder.resume(options.folder)
    else:
        folder = new_folder(config)
    limit = None if options.time_limit_minutes is None else 60 * options.time_limit_minutes
    deadline = None if limit is None else time.monotonic() + limit
    with folder, interruptible() as interruption:
        if resume:
            continue_recipe(folder, config)
        state, notes = resumed(session, folder) if resume else (RunState(), [])
        progress = Progress(options.num_steps, first_step=state.step + 1, time_limit_seconds=limit)
        with progress:
            timing = None if resume else report.timed_step(session)
            progress.start([*report.plan(session, timing), *notes])
            if not state.before:
                evaluate_before(session, folder, state, progress)
            steps(session, folder, state, progress, lambda: bool(interruption) or passed(deadline))
            if interruption.signal is not None:
                progress.finish(report.interrupted(folder.path, state.step, interruption.signal))
                return Run(folder=folder.path, summary={}, interrupted=True)
            return conclude(session, folder, state, progress)


def continue_recipe(folder: RunFolder, config: Config) -> None:
    """Refuse to continue a run under another recipe; what may change (how long, what is kept) is saved anew.

    Saved with the run, so that the file still says what the run is.
    """
    sections = parse_yaml(folder.config_yaml)
    assert isinstance(sections, dict)
    saved = build(Config, [RecipeLayer(where=str(folder.path / "config.yaml"), sections=sections)])
    if lasting(saved) != lasting(config):
        different = [name for name in asdict(config) if getattr(lasting(saved), name) != getattr(lasting(config), name)]
        raise UserError(
            f"resume {folder.path}: the config differs from the run's own in {', '.join(different)}."
            "  A resumed run keeps its recipe; for another one start another run."
        )
    folder.replace_config(as_recipe(replace(config, run=replace(config.run, overwrite=False))))


def lasting(config: Config) -> Config:
    """The part of a config that a resumed run may not change."""
    run = replace(
        config.run,
        folder="-",
        overwrite=False,
        num_steps=0,
        time_limit_minutes=None,
        early_stop_evaluations=None,
    )
    return replace(config, run=run, checkpoint=CheckpointOptions())


def steps(
    session: Session, folder: RunFolder, state: RunState, progress: Progress, asked_to_stop: Callable[[], bool]
) -> None:
    """Take the steps that are left, until the last one, the time limit, an early stop or a signal."""
    config = session.config
    history, raised = folder.metrics(), folder.raised()
    stop = asked_to_stop() or out_of_patience(config, state)  # already: a resumed run may have nothing left to do
    while state.step < config.run.num_steps and not stop:
        clock, step = Clock(), state.step + 1
        journal = partial(folder.journal_scores, step)
        moment = StepContext(step=step, weights_version=state.num_updates, clock=clock, journal=journal)
        with told_with_its_place(step, folder):
            collected = collect(session, moment)
            metrics = {
                **step_metrics(collected.judged.groups, collected.grades, collected.judged.advantages),
                **learn(session, step, collected, state, clock),
            }
        state.step = step
        refresh_reference(session, step)
        evaluation = evaluate_when_due(session, state, clock)
        with clock("save"):
            folder.write_rollouts(step, *collected.everything())
        metrics |= evaluation
        history.append({"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}})
        metrics["num_alarms"] = float(raise_alarms(folder, progress, history, raised, collected))
        finish_step(folder, state, progress, metrics, clock)
        stop = asked_to_stop() or out_of_patience(config, state)
        due = config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0
        if due or stop or step == config.run.num_steps:
            save_checkpoint(folder, session, state, score=evaluation.get("eval/accuracy_sampled"))


@contextmanager
def told_with_its_place(step: int, folder: RunFolder) -> Iterator[None]:
    """Let an error that ends the run say in which step it happened, and what is left to go on from."""
    try:
        yield
    except RunError as error:
        newest = max(checkpoint.saved_steps(folder.checkpoints).items())[1]  # of step 0 at least
        raise RunError(f"step {step}: {error}\n    The last good checkpoint is {newest}.") from error


def learn(session: Session, step: int, collected: Collected, state: RunState, clock: Clock) -> Metrics:
    """The second half of a step: passes over its groups, one update per mini-batch."""
    config, groups = session.config, collected.judged.groups
    objective = Objective(
        algorithm=session.algorithm,
        temperature=config.rollout.temperature,
        reference=session.reference,
        measure_entropy=config.update.measure_entropy,
    )
    taken: list[Metrics] = []
    num_updates = config.run.num_steps * session.updates_per_step
    for index, batch in enumerate(batches(session, step, collected, clock)):
        if not batch.completions:
            continue  # nothing to learn from; a zero gradient would still move AdamW's weights
        rate = learning_rate(config.update, session.update_index(step) + index, num_updates)
        with clock("update"):
            taken.append(update(session.policy, session.optimizer, batch, objective, config.update, rate))
        state.num_updates += 1
    state.num_tokens += step_tokens(groups)
    state.completion_tokens += sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
    state.trained_tokens += int(sum(metrics["tokens/trained"] for metrics in taken))
    counts = {
        "num_updates": float(len(taken)),
        "num_groups": float(len(groups)),
        "num_replaced_groups": float(sum(len(set_aside) for set_aside, _ in collected.replaced)),
        "num_tokens": float(state.num_tokens),
    }
    return {**merged(taken), **counts}


def batches(session: Session, step: int, collected: Collected, clock: Clock) -> Iterator[Batch]:
    """The batch of each update: whole groups, every epoch in an order of its own, weights fixed on each."""
    config, algorithm = session.config, session.algorithm
    num_groups, parts = len(collected.judged.groups), config.update.minibatches_per_epoch
    for epoch in range(config.update.epochs_per_step):
        order = list(range(num_groups))
        if parts > 1:
            Random(f"{config.run.seed} minibatches {step} {epoch}").shuffle(order)
        for part in range(parts):
            rows = sorted(order[part * num_groups // parts : (part + 1) * num_groups // parts])
            with clock("collate"):
                batch = collate(
                    collected.judged.select(rows),
                    algorithm.token_weights,
                    max_completion_tokens=config.rollout.max_completion_tokens,
                    keep_zero_advantages=algorithm.keeps_zero_advantages,
                )
            yield batch


def merged(updates: Sequence[Metrics]) -> Metrics:
    """One step's metrics from those of its updates.

    The gap between sampler and trainer is that of the first update, when both have the same weights; extremes stay
    extremes, tokens add up, the rest are means.
    """
    if not updates:
        return {}
    combine: dict[str, Callable[[list[float]], float]] = {
        "ratio/min": min,
        "ratio/max": max,
        "tokens/trained": sum,
        "num_micro_batches": sum,
        "learning_rate": lambda values: values[-1],
        "sampling/sampling_logp_difference/mean": lambda values: values[0],
        "sampling/sampling_logp_difference/max": lambda values: values[0],
    }
    return {name: combine.get(name, fmean)([metrics[name] for metrics in updates]) for name in updates[0]}


def refresh_reference(session: Session, step: int) -> None:
    """Take the reference from the policy again, where the recipe says so."""
    every = session.config.reference.refresh_every
    if session.reference is not None and every and step % every == 0:
        session.reference = frozen_copy(session.policy)


def evaluate_when_due(session: Session, state: RunState, clock: Clock) -> Metrics:
    """An evaluation in brief, every so many steps."""
    options = session.config.evaluation
    if not options.every_steps or state.step % options.every_steps:
        return {}
    with clock("evaluate"):
        metrics = brief_evaluation(session.engine, session.questions(), problems=options.brief_problems)
    if "eval/accuracy_sampled" in metrics:
        state.saw_evaluation(metrics["eval/accuracy_sampled"])
    return metrics


def raise_alarms(
    folder: RunFolder, progress: Progress, history: Sequence[Line], raised: dict[str, int], collected: Collected
) -> int:
    """Tell of what looks wrong in the last step, once in a while; returns how many alarms that were."""
    found = alarms(history, raised)
    step = int(history[-1]["step"] or 0)
    for alarm in found:
        shown = transcript(alarm, collected.judged.groups, collected.grades)
        raised[alarm.name] = step
        folder.append_alarm(step, alarm.name, alarm.says, shown)
        indented = shown.replace("\n", "\n    ")
        progress.note(f"ALARM, step {step}, {alarm.name}: {alarm.says}.  For instance:\n    {indented}")
    return len(found)


def finish_step(folder: RunFolder, state: RunState, progress: Progress, metrics: Metrics, clock: Clock) -> None:
    """Log the step and show it."""
    state.seconds = {
        stage: state.seconds.get(stage, 0.0) + clock.seconds[stage] for stage in {**state.seconds, **clock.seconds}
    }
    timed = {
        **metrics,
        "step_time": clock.total,
        "tokens_per_second": metrics["tokens/completion"] / clock.total,
        **{f"seconds/{stage}": value for stage, value in clock.seconds.items()},
    }
    folder.append_metrics(state.step, timed)
    progress.step(state.step, timed)


def passed(deadline: float | None) -> bool:
    """Whether the run's time limit is over."""
    return deadline is not None and time.monotonic() >= deadline


def out_of_patience(config: Config, state: RunState) -> bool:
    """Whether too many evaluations in a row brought no new best."""
    patience = config.run.early_stop_evaluations
    return patience is not None and state.evaluations_since_best >= patience


def evaluate_before(session: Session, folder: RunFolder, state: RunState, progress: Progress) -> None:
    """Measure the policy that training starts from, and save it as step 0."""
    clock = Clock()
    with clock("evaluate"):
        state.before, state.transcripts = evaluated(session, progress, "before training")
    state.seconds = dict(clock.seconds)
    folder.append_metrics(0, report.held_out_metrics(state.before))
    save_checkpoint(folder, session, state)


def evaluated(session: Session, progress: Progress, when: str) -> tuple[dict[str, object], list[list[str]]]:
    """The full evaluation, and the first sampled completions of the problems that the end shows."""
    options, questions = session.config.evaluation, session.questions()
    total = num_completions(session.task, questions, samples=options.samples)
    with progress.stage(f"held-out problems {when}", total) as advance:
        results, groups = full_evaluation(
            session.engine, session.task, questions, samples=options.samples, advance=advance
        )
    shown = [[group.prompt.text, group.graded_text(group.rollouts[0])] for group in groups[: report.SHOWN]]
    return results, shown


def conclude(session: Session, folder: RunFolder, state: RunState, progress: Progress) -> Run:
    """Measure what training made of the policy, save the model, and say what came out."""
    clock = Clock()
    with clock("evaluate"):
        after, transcripts = evaluated(session, progress, "after training")
    state.seconds["evaluate"] = state.seconds.get("evaluate", 0.0) + clock.seconds["evaluate"]
    summary = report.write_results(session, folder.path, state, after)
    folder.write_summary(summary)
    progress.finish(report.closing_lines(folder.path, summary, state.transcripts, transcripts))
    return Run(folder=folder.path, summary=summary)


def resumed(session: Session, folder: RunFolder) -> tuple[RunState, list[str]]:
    """The run's state at its last checkpoint, with what was written after it cut away."""
    saved = checkpoint.load_latest(folder.checkpoints)
    if saved is None:
        folder.cut_after(-1)
        return RunState(), ["No checkpoint yet: the run starts again."]
    notes = checkpoint.restore_threads(saved, session.threads)
    state = restore(session, saved)
    folder.cut_after(state.step)
    finished = state.step >= session.config.run.num_steps
    left = "  That was the last one: the run is only measured again." if finished else ""
    return state, [f"Resumed after step {state.step}.{left}", *notes]


def show_plan(config: Config, *, rows: Rows | None = None) -> None:
    """Print what a run would be, with the seconds of one timed step, and train nothing."""
    with open_session(config, rows=rows) as session:
        require_room(session)
        for line in report.plan(session, report.timed_step(session)):
            print(line)
