"""The RL loop: prompts → rollouts → grades → advantages → batches → loss → updates, step by step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.config import Config
from posttrain.environments.protocol import Own
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.generation.parity import gap_metrics, probed_gaps
from posttrain.models.policy import Policy
from posttrain.ranks.joining import joined
from posttrain.runs.folder import WEIGHTS, interrupted_lines, saved_recipe, shared_recipe
from posttrain.runs.harness import Harness, HarnessOptions
from posttrain.runs.progress import Clock
from posttrain.runs.prompt_preview import Reader, first_step_lines
from posttrain.runs.reply_journal import ReplyFile
from posttrain.runs.reports import Run, StepReport, UpdateTokens
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_inputs import RunInputs, require_same_inputs
from posttrain.runs.run_steps import RunSteps, StartOptions, TrainingSteps, to_the_end
from posttrain.runs.tracker import require_trackers
from posttrain.runs.watchers import RewardGuard, SamplerGuard, Watcher
from posttrain.schemas import did_you_mean
from posttrain.tasks.base import Task
from posttrain.tasks.dataset import Rows
from posttrain.training import report
from posttrain.training.collector import discard_scores
from posttrain.training.credited_step import CreditedStep
from posttrain.training.evaluation import held_out_metrics
from posttrain.training.held_out import evaluate_when_due, held_out_score, measure
from posttrain.training.learner import earlier_rollouts, warm_start
from posttrain.training.metrics import UpdateReport, step_metrics, update_metrics
from posttrain.training.run_replay import count_step, train_again
from posttrain.training.session import (
    NO_CALLER,
    CallerObjects,
    Rewards,
    Session,
    Tools,
    inputs_of,
    open_session,
    require_training_by_reward,
)
from posttrain.training.staleness import collecting, require_ahead
from posttrain.training.trained import RunState


def train(
    config: Config,
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
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
    recipe: str = "",
) -> Run:
    """Improve a policy by sampling, grading and reinforcing its own completions.

    For callers in Python: `policy` (made by `posttrain.as_policy`), `task`, `engine` and `algorithm` are objects that
    replace those of the config; `rewards` are your functions, `rows` your prompts, `held_out_rows` those to evaluate
    on, and `watchers` see each step.  `environment` is a class or a factory of what replies to the policy's turns, and
    `tools` are functions that it may call.  `resume` continues the run in `config.run.folder` from its last checkpoint,
    with the same bits as an uninterrupted run.  `from_step` resumes from an earlier step's checkpoint and drops later
    steps.  `accept_changes` resumes even if rows, rewards or files have changed, for example after a corrected reward.
    `recipe` is the source of the config in the summary.
    """
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
    start = StartOptions(
        watchers=watchers, resume=resume, from_step=from_step, accept_changes=accept_changes, recipe=recipe
    )
    return to_the_end(run_steps(config, caller, start))


def run_steps(config: Config, caller: CallerObjects, start: StartOptions) -> RunSteps:
    """The run of a config and a caller's objects, step by step; it starts at the first `next`."""
    require_training_by_reward(config)
    require_trackers(config.run.report_to, config.tracker)
    with joined(config.run.rank_timeout_seconds) as ranks:
        ranks.agree("the settings", lambda: shared_recipe(config))
        if ranks.rank:
            from posttrain.training.following import RlFollower, follow_rank_0

            return follow_rank_0(RlFollower(config, caller, ranks), ranks, config.run.folder)
        start, inputs = start.now(ranks), inputs_of(config, caller)
        if start.resume:
            inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=start.accept_changes)
        else:
            inputs = replace(inputs, recipe=start.recipe)
        with open_session(config, caller, ranks=ranks) as session:
            session.trained.run.recipe = inputs.recipe
            make_ready(session)
            run = yield from train_session(session, inputs, start)
        return ranks.finish(run)


def make_ready(session: Session) -> None:
    """Reject what cannot be trained, and warn about memory before sampling, which might exhaust it."""
    config = session.config
    config.require_suits(session.algorithm)
    if config.rollout.max_staleness:
        require_ahead(session)
    session.require_prompts_and_rows()
    config.require_room(session.longest_prompt_tokens)
    context = session.policy.max_positions
    longest = session.longest_prompt_tokens + config.rollout.max_completion_tokens
    if session.environment.workers is not None:  # replies are of any length
        longest = context
    session.learner.require_context(min(longest, context))  # where completions end at the latest
    for line in report.planned_memory(session)[1]:
        print(line, flush=True)


def train_session(session: Session, inputs: RunInputs, start: StartOptions) -> RunSteps:
    """The run of a session, from its folder to its summary."""
    config, state, first = session.config, session.trained.run, None
    run = config.run
    folder = RunFolder.resume(run.folder) if start.resume else RunFolder.claim(run.folder, overwrite=run.overwrite)

    def stop_early() -> bool:
        patience, limit = config.run.early_stop_evaluations, config.run.token_limit
        out_of_patience = patience is not None and state.evaluations_since_best >= patience
        return out_of_patience or (limit is not None and state.sampled_tokens >= limit)

    options = HarnessOptions(
        run=run,
        checkpoint=config.checkpoint,
        watchers=start.watchers,
        guards=[SamplerGuard(), RewardGuard(folder, config.grading)],
        score=held_out_score,
        stop_early=stop_early,
        config=config,
        from_step=start.from_step,
        ranks=session.policy.ranks,
        kept_from={"metrics.jsonl": 0, "scores.jsonl": 1, "rollouts": 1},
        keeps_finished=config.rollout.max_staleness > 0 and not start.accept_changes,
    )
    with Harness(folder, session.trained, options) as harness:
        notes = resume_run(session, harness) if start.resume else []
        if inputs.changes:
            folder.write_inputs(inputs)
            notes += inputs.notes
        session.load_weights(transfer=folder.path / WEIGHTS)
        session.keep_replies(ReplyFile(folder, changed=start.accept_changes))
        if not state.before:
            if config.update.optimizer_from:  # a resumed run has it in its checkpoints, from step 0 on
                session.learner.load_optimizer_state(config.update.optimizer_from)
            # Before anything is measured or an earlier run is overwritten: a mistake in a reward shows now.
            collected = session.collector.collect(1, folder.journal_scores, harness.clock)
            notes += warm_start(session.learner, harness.clock)
            first = session.learner.credit(collected, harness.clock)  # so does one in a reference or a teacher
        planned = report.rl_plan_lines(session, None if first is None else first.collected, harness.clock.seconds)
        harness.start([*planned, *notes])
        harness.progress.limit_tokens(state.sampled_tokens, run.token_limit)
        if not state.before:
            state.transcripts = measure(session, harness, "before")[1]
            if not start.resume:  # only now: a mistake in the evaluation does not cost an earlier run either
                folder.begin(saved_recipe(config))
                session.policy.ranks.begins()  # from here on, restarted ranks resume: the folder is no longer new
            folder.write_inputs(inputs)
            folder.append_metrics(0, held_out_metrics(state.before, session.questions().probes))
            harness.save()
        folder.write_tokenizer(session.policy.tokenizer)
        harness.progress.compare_with(held_out_metrics(state.before))
        try:
            with harness.naming_the_step(), collecting(session):
                yield from take_steps(session, harness, first)
        except GeneratorExit:  # the caller wants no more steps
            harness.leave()
            end_early(session, harness)
            raise
        return end_early(session, harness) if harness.interruption else conclude_rl(session, harness, state)


def take_steps(session: Session, harness: Harness, first: CreditedStep | None) -> Iterator[StepReport]:
    """Take the remaining steps; `first` is the next step, already collected and credited."""
    collector, learner = session.collector, session.learner
    journal, state = harness.folder.journal_scores, session.trained.run
    for step in harness.steps():
        collected = first.collected if first else collector.collect(step, journal, harness.clock)  # rollouts, grades
        credited = first or learner.credit(collected, harness.clock)  # reference log-probs, advantages
        gaps = learner.undropped_gaps(credited.groups)  # sampler and trainer, where an update drops inputs
        learner.remember(credited)  # what outlives the step: an adaptive coefficient, whether the critic is ready
        batches = learner.batches(credited, harness.clock)  # token weights, fixed on each whole update
        updates = learner.learn(batches, step, harness.clock)  # losses, updates
        updated = learner.updated(credited.groups, updates, harness.clock)  # log π after them, where a run keeps it
        session.load_weights()
        gaps = probed_where_all_is_old(session, updates, gaps)
        count_step(state, collected, updates, learner.num_updates)
        evaluation = evaluate_when_due(session, harness)
        yield harness.record(step_report(session, credited, updates, evaluation, gaps, updated))
        first = None


def probed_where_all_is_old(session: Session, updates: Sequence[UpdateReport], gaps: Tensor | None) -> Tensor | None:
    """A step's gaps; if older weights sampled all its tokens, the gaps on fixed prompts with the current weights.

    With several ranks, which share the trainer's passes, only the servers' probe is used.
    """
    is_old = bool(updates) and not len(updates[0].gaps) and session.config.rollout.max_staleness > 0
    if not is_old or session.policy.ranks.size > 1:
        return gaps
    longest = session.longest_prompt_tokens + session.config.rollout.max_completion_tokens
    return probed_gaps(session.policy, session.engine, min(longest, session.engine.max_positions))


def step_report(
    session: Session,
    credited: CreditedStep,
    updates: Sequence[UpdateReport],
    evaluation: Mapping[str, float],
    undropped: Tensor | None = None,
    updated: UpdateTokens | None = None,
) -> StepReport:
    """A step's report for watchers; `undropped` are its gaps without dropout, if updates use it, or a probe's gaps."""
    collected = credited.collected
    limited = session.algorithm.largest_epoch_kl is not None
    first = updates[0].gaps if updates else torch.zeros(0)
    known = len(first if undropped is None else undropped) > 0
    gaps = gap_metrics(session.policy, session.engine, first, undropped) if known else {}
    metrics = {
        **step_metrics(collected.groups, collected.grades, credited.groups.informed),
        **session.behaviours.metrics(collected.groups),
        **collected.metrics,
        **credited.metrics,
        **update_metrics(updates),
        **gaps,
        **({"num_updates_left_out": float(session.learner.left_out)} if limited else {}),
        "num_updates": float(len(updates)),
        "num_groups": float(len(collected.groups)),
        "num_replaced_groups": float(sum(len(groups) for groups, _ in collected.replaced)),
        "num_tokens": float(session.trained.run.num_tokens),
        "num_sampled_tokens": float(session.trained.run.sampled_tokens),
        **evaluation,
    }
    return StepReport(
        step=collected.step,
        metrics=metrics,
        num_tokens=collected.num_completion_tokens,
        groups=collected.groups,
        grades=collected.grades,
        advantages=credited.advantages,
        token_rewards=credited.token_rewards,
        process_rewards=credited.process_rewards,
        token_advantages=credited.groups.columns.advantages,
        token_values=credited.groups.columns.known.get("values"),
        replaced=collected.replaced,
        updates=[update.tokens for update in updates if update.tokens is not None],
        updated=updated,
    )


def end_early(session: Session, harness: Harness) -> Run:
    folder = harness.folder.path
    lines = interrupted_lines(folder, session.trained.step, harness.interruption.reason, harness.command)
    harness.end({}, lines)
    return Run(folder=folder, summary={}, interrupted=True)


def conclude_rl(session: Session, harness: Harness, state: RunState) -> Run:
    """Measure the trained policy, save the model, and report the results."""
    with harness.naming_the_step():
        after, transcripts = measure(session, harness, "after")
    folder, probes = harness.folder, session.questions().probes
    if after["num_problems"]:
        folder.append_metrics(state.step, held_out_metrics(after, probes))
    summary = report.write_results(session, folder, state, after)
    harness.end(summary, report.closing_lines(session, folder.path, summary, (state.transcripts, transcripts)))
    return Run(folder=folder.path, summary=summary)


def resume_run(session: Session, harness: Harness) -> list[str]:
    """Restore the checkpoint; returns notes for the plan."""
    notes = harness.resume(session.threads)
    if again := harness.steps_again:
        for step in again:
            train_again(session, step, harness.folder)
        notes.append(f"Steps {again[0]}-{again[-1]} were trained on again from their rollout files, without sampling.")
    if not session.engine.reproducible:
        notes.append(
            f"Engine {type(session.engine).__name__} is not reproducible: from here on steps differ from those of an"
            " uninterrupted run."
        )
    return notes


def show_rl_plan(config: Config, caller: CallerObjects = NO_CALLER, *, show_prompts: int = 1, recipe: str = "") -> None:
    """Print the plan of a run and the seconds of one step, whose gradient is discarded; train nothing.

    Shows `show_prompts` prompts of that step with a completion and its scores.  `recipe` is its name in the plan.
    """
    with open_session(config, caller) as session:
        session.trained.run.recipe = recipe
        make_ready(session)
        earlier_rollouts(session.algorithm)
        session.load_weights()
        clock, learner = Clock(), session.learner
        collected = session.collector.collect(1, discard_scores, clock)
        learner.try_gradient(learner.batches(learner.credit(collected, clock), clock), clock)
        plan = report.rl_plan_lines(session, collected, clock.seconds, whole_step=True)
        reader = Reader(
            tokenizer=session.policy.tokenizer,
            stop_ids=session.policy.stop_ids,
            template_file="" if caller.policy else config.model.chat_template,
            template_options=config.model.template_options,
        )
        shown = first_step_lines(collected.groups, collected.grades, show_prompts, reader)
        print("\n".join([*plan, "", *shown]))


class TrainArguments(TypedDict, total=False):
    """The arguments of `train` except the config."""

    policy: Policy | None
    task: Task | None
    engine: Engine | None
    algorithm: Algorithm | None
    rewards: Rewards
    rows: Rows | None
    held_out_rows: Rows | None
    environment: Own
    tools: Tools
    watchers: Sequence[Watcher]
    resume: bool
    from_step: int | None
    accept_changes: bool
    recipe: str


def steps(config: Config, **objects: Unpack[TrainArguments]) -> TrainingSteps:
    """The run of `train` with the same arguments, step by step.

        with posttrain.steps(config, rows=rows, rewards=[solved]) as steps:
            for step in steps:
                print(step.step, step.metrics["reward"], step.groups[0].rollouts[0].text)
        print(steps.run.summary)

    Each record has the step's metrics, groups, grades and advantages (`posttrain.runs.reports.StepReport`).  Weights,
    folder and checkpoints equal those of `train`, bit for bit.  Time between steps only counts for
    `run.time_limit_minutes`.  Without `with`, call `steps.close()` after leaving the loop early: until then the run
    folder is locked.
    """
    given: dict[str, Any] = dict(objects)
    unknown = given.keys() - TrainArguments.__annotations__.keys()
    if unknown:
        name = min(unknown)
        raise UserError(f"steps: no such argument: `{name}`.  {did_you_mean(name, TrainArguments.__annotations__)}")
    start = StartOptions(**{each.name: given.pop(each.name) for each in fields(StartOptions) if each.name in given})
    return TrainingSteps(run_steps(config, CallerObjects(**given), start))
