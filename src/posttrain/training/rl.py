"""The loop: prompts → rollouts → grades → advantages → batches → loss → updates, as often as the recipe says."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.config import Config
from posttrain.generation.engine import Engine
from posttrain.generation.parity import gap_metrics
from posttrain.models.policy import Policy
from posttrain.runs.clock import Clock
from posttrain.runs.folder import interrupted_lines, saved_recipe
from posttrain.runs.harness import Harness, HarnessOptions
from posttrain.runs.prompt_preview import Reader, first_step_lines
from posttrain.runs.reports import EvaluationReport, Run, ScoredCompletions, StepReport
from posttrain.runs.run_folder import RunFolder, claim_folder
from posttrain.runs.run_inputs import RunInputs, require_same_inputs
from posttrain.runs.summary import headline
from posttrain.runs.trackers.tracker import require_trackers
from posttrain.runs.watchers import SameReward, SamplerGuard, UnscoredSteps, Watcher
from posttrain.tasks.base import Task
from posttrain.training import report
from posttrain.training.caller.caller_inputs import inputs_of
from posttrain.training.caller.caller_objects import NOTHING_BROUGHT, CallerObjects, Rewards, Rows, StartOptions
from posttrain.training.collector import CollectedStep, no_journal
from posttrain.training.credited_step import CreditedStep
from posttrain.training.evaluation import brief_evaluation, full_evaluation, num_completions
from posttrain.training.metrics import step_metrics, step_tokens
from posttrain.training.session import (
    Session,
    open_session,
    require_room,
    require_sound_rows,
    require_training_by_reward,
)
from posttrain.training.trained import RunState
from posttrain.training.update import trial_gradient, undropped_gaps
from posttrain.training.update_metrics import UpdateReport, update_metrics
from posttrain.training.warm_start import require_earlier_rollouts, warm_start


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
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
    recipe: str = "",
) -> Run:
    """Improve a policy by sampling, grading and reinforcing its own completions.

    For callers in Python: `policy` (made by `posttrain.as_policy`), `task`, `engine` and `algorithm` are objects in
    place of what the config describes; `rewards` are functions of your own, `rows` your own prompts with
    `held_out_rows` those to evaluate on, and `watchers` see each step.  With `resume` the run in `config.run.folder`
    goes on from its last checkpoint, to the same bits as if it had never stopped; with `from_step` from that of an
    earlier step, giving up what came after; with `accept_changes` also where rows, rewards or files are no longer what
    the run was made of, such as a reward that has been mended.  `recipe` is what the summary says that the config comes
    from.
    """
    own = CallerObjects(
        policy=policy,
        task=task,
        engine=engine,
        algorithm=algorithm,
        rewards=rewards,
        rows=rows,
        held_out_rows=held_out_rows,
    )
    how = StartOptions(
        watchers=watchers, resume=resume, from_step=from_step, accept_changes=accept_changes, recipe=recipe
    )
    return to_the_end(run_steps(config, own, how))


RunSteps = Generator[StepReport, None, Run]
"""A run, which yields each step when it is recorded and returns what came out.

Closed early it ends as an interrupted run does: what was recorded last is saved, and no `Run` is returned.
"""


def to_the_end(steps: RunSteps) -> Run:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


def run_steps(config: Config, own: CallerObjects, how: StartOptions) -> RunSteps:
    """The run that a config and a caller's objects describe, step by step; nothing is done before the first `next`."""
    require_training_by_reward(config)
    require_trackers(config.run.report_to, config.tracker)
    inputs = None
    if how.resume:
        inputs = require_same_inputs(Path(config.run.folder), inputs_of(config, own), accept_changes=how.accept_changes)
    with open_session(config, own) as session:
        inputs = inputs or replace(inputs_of(config, own), recipe=how.recipe)
        session.trained.run.recipe = inputs.recipe
        make_ready(session)
        return (yield from train_session(session, inputs, how))


def make_ready(session: Session) -> None:
    session.config.require_suits(session.algorithm)
    require_room(session)
    require_sound_rows(session)
    for line in report.planned_memory(session)[1]:
        print(line, flush=True)


def rl_harness_options(
    session: Session, folder: RunFolder, watchers: Sequence[Watcher], from_step: int | None
) -> HarnessOptions:
    config = session.config
    return HarnessOptions(
        run=config.run,
        checkpoint=config.checkpoint,
        watchers=watchers,
        guards=[
            SamplerGuard(),
            UnscoredSteps(folder, config.grading.max_unscored_steps),
            SameReward(folder, config.grading.max_same_reward_steps),
        ],
        score=held_out_score,
        stop_early=lambda: at_an_end(config, session.trained.run),
        config=config,
        from_step=from_step,
        kept_from={"metrics.jsonl": 0, "scores.jsonl": 1, "rollouts": 1},
    )


def train_session(session: Session, inputs: RunInputs, how: StartOptions) -> RunSteps:
    """The run of a session, from its folder to its summary."""
    config, state = session.config, session.trained.run
    folder = RunFolder.resume(config.run.folder) if how.resume else claim_folder(config)
    options = rl_harness_options(session, folder, how.watchers, how.from_step)
    with Harness(folder, session.trained, options) as harness:
        notes = go_on(session, harness) if how.resume else []
        if inputs.changes:
            folder.write_inputs(inputs)
            notes += inputs.notes
        state, first = session.trained.run, None
        session.load_weights()
        if not state.before:
            if config.update.optimizer_from:  # of a run that is resumed a checkpoint has it, from step 0 on
                session.learner.go_on_with_optimizer(config.update.optimizer_from)
            # Before anything is measured or an earlier run is given up: a mistake in a reward shows now.
            collected = session.collector.collect(1, folder.journal_scores, harness.clock)
            notes += warm_start(session.learner, harness.clock)
            first = session.learner.credit(collected, harness.clock)  # nor in what else it is compared with
        planned = report.rl_plan_lines(session, None if first is None else first.collected, harness.clock.seconds)
        harness.start([*planned, *notes])
        if not state.before:
            measure_before(session, harness)
            if not how.resume:  # only now: nor does a mistake in the evaluation cost an earlier run
                folder.begin(saved_recipe(config))
            folder.write_inputs(inputs)
            save_before(session, harness)
        folder.write_tokenizer(session.policy.tokenizer)
        harness.progress.compare_with(report.held_out_metrics(session.trained.run.before))
        try:
            with harness.naming_the_step():
                yield from take_steps(session, harness, first)
        except GeneratorExit:  # whoever takes the steps wants no more
            harness.leave()
            end_early(session, harness)
            raise
        return end_early(session, harness) if harness.interruption else conclude_rl(session, harness, state)


def take_steps(session: Session, harness: Harness, first: CreditedStep | None) -> Iterator[StepReport]:
    """Take the steps that are left; `first` is what the first of them has collected and credited already."""
    collector, learner = session.collector, session.learner
    journal, state = harness.folder.journal_scores, session.trained.run
    for step in harness.steps():
        collected = first.collected if first else collector.collect(step, journal, harness.clock)  # rollouts, grades
        credited = first or learner.credit(collected, harness.clock)  # reference log-probs, advantages
        gaps = gaps_before(session, credited)  # sampler and trainer, where an update drops inputs
        learner.remember(credited)  # what outlives the step: an adaptive coefficient, whether the critic is ready
        batches = learner.batches(credited, harness.clock)  # token weights, fixed on each whole update
        updates = learner.learn(batches, step, harness.clock)  # losses, updates
        session.load_weights()
        count_step(state, collected, updates, learner.num_updates)
        evaluation = evaluate_when_due(session, harness)
        yield harness.record(step_report(session, credited, updates, evaluation, gaps))
        first = None


def gaps_before(session: Session, credited: CreditedStep) -> Tensor | None:
    settings = session.learner.settings
    budget = settings.update.tokens_per_microbatch
    return undropped_gaps(session.policy, credited.groups, temperature=settings.temperature, max_tokens=budget)


def count_step(state: RunState, collected: CollectedStep, updates: Sequence[UpdateReport], num_updates: int) -> None:
    state.step, state.num_updates = collected.step, num_updates
    state.num_tokens += step_tokens(collected.groups)
    state.completion_tokens += collected.num_completion_tokens
    state.sampled_tokens += collected.num_sampled_tokens
    state.trained_tokens += sum(update.num_tokens for update in updates)


def step_report(
    session: Session,
    credited: CreditedStep,
    updates: Sequence[UpdateReport],
    evaluation: Mapping[str, float],
    undropped: Tensor | None = None,
) -> StepReport:
    """What the watchers are told of a step; `undropped` are its gaps where those of the updates are of dropout."""
    collected = credited.collected
    limited = session.algorithm.largest_epoch_kl is not None
    gaps = gap_metrics(session.policy, session.engine, updates[0].gaps, undropped) if updates else {}
    metrics = {
        **step_metrics(collected.groups, collected.grades, credited.groups.informed),
        **session.behaviours.metrics(collected.groups),
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
    )


def evaluate_when_due(session: Session, harness: Harness) -> Mapping[str, float]:
    """An evaluation in brief, every so many steps."""
    options, state = session.config.evaluation, session.trained.run
    if not options.every_steps or state.step % options.every_steps:
        return {}
    with harness.clock("evaluate"):
        kept: list[ScoredCompletions] = []
        problems, questions = options.brief_problems, session.questions_now()
        metrics = brief_evaluation(session.engine, questions, problems=problems, keep=kept.append)
        harness.evaluated(EvaluationReport(step=state.step, results=metrics, completions=kept))
    if (score := held_out_score(metrics)) is not None:
        state.saw_evaluation(score)
    return metrics


def held_out_score(metrics: Mapping[str, float]) -> float | None:
    """What decides which checkpoint is the best and when to stop early: held-out accuracy, or what stands for it."""
    found = headline(metrics, "eval/")
    return None if found is None else found[1]


def at_an_end(config: Config, state: RunState) -> bool:
    patience, limit = config.run.early_stop_evaluations, config.run.token_limit
    out_of_patience = patience is not None and state.evaluations_since_best >= patience
    return out_of_patience or (limit is not None and state.sampled_tokens >= limit)


def measure_before(session: Session, harness: Harness) -> None:
    clock, state = Clock(), session.trained.run
    with clock("evaluate"):
        state.before, state.transcripts = measure_held_out(session, harness, "before")
    state.seconds = dict(clock.seconds)


def save_before(session: Session, harness: Harness) -> None:
    harness.folder.append_metrics(0, report.held_out_metrics(session.trained.run.before, session.questions().probes))
    harness.save()


def measure_held_out(
    session: Session, harness: Harness, when: Literal["before", "after"]
) -> tuple[dict[str, object], list[list[str]]]:
    """The full evaluation, and the first sampled completions of the problems that the end shows."""
    options, questions = session.config.evaluation, session.questions_now()
    total = num_completions(questions, samples=options.samples)
    kept: list[ScoredCompletions] = []
    with harness.progress.stage(f"held-out problems {when} training", total) as advance:
        results, groups = full_evaluation(
            session.engine, questions, samples=options.samples, advance=advance, keep=kept.append
        )
    step = session.trained.step
    harness.evaluated(EvaluationReport(step=step, results=results, groups=groups, evaluation=when, completions=kept))
    first = {
        group.prompt.text: group for group in reversed(groups)
    }  # of a prompt that is asked several times the first
    shown = [first[text] for text in dict.fromkeys(group.prompt.text for group in groups)][: report.SHOWN]
    return results, [[group.prompt.text, group.graded_text(group.rollouts[0])] for group in shown]


def end_early(session: Session, harness: Harness) -> Run:
    folder, step = harness.folder.path, session.trained.run.step
    harness.end({}, interrupted_lines(folder, step, harness.interruption.reason, harness.command))
    return Run(folder=folder, summary={}, interrupted=True)


def conclude_rl(session: Session, harness: Harness, state: RunState) -> Run:
    """Measure what training made of the policy, save the model, and say what came out."""
    clock = Clock()
    with clock("evaluate"):
        after, transcripts = measure_held_out(session, harness, "after")
    state.add_seconds(clock.seconds)
    folder, probes = harness.folder.path, session.questions().probes
    if after["num_problems"]:
        harness.folder.append_metrics(state.step, report.held_out_metrics(after, probes))
    summary = report.write_results(session, harness.folder, state, after)
    harness.end(summary, report.closing_lines(session, folder, summary, (state.transcripts, transcripts)))
    return Run(folder=folder, summary=summary)


def go_on(session: Session, harness: Harness) -> list[str]:
    notes = harness.resume(session.threads)
    if not session.engine.reproducible:
        notes.append(
            f"Engine {type(session.engine).__name__} draws random numbers of its own (reproducible = False): from here"
            " on the steps are not those, bit for bit, of a run that never stopped."
        )
    return notes


def show_rl_plan(
    config: Config, own: CallerObjects = NOTHING_BROUGHT, *, show_prompts: int = 1, recipe: str = ""
) -> None:
    """Print what a run would be, with the seconds of one step whose gradient is thrown away, and train nothing.

    Of that step so many prompts are shown, each with a completion and its scores.  `recipe` names the recipe.
    """
    with open_session(config, own) as session:
        session.trained.run.recipe = recipe
        make_ready(session)
        require_earlier_rollouts(session.algorithm)
        session.load_weights()
        clock = Clock()
        collected = session.collector.collect(1, no_journal, clock)
        batches = session.learner.batches(session.learner.credit(collected, clock), clock)
        learner = session.learner
        objective, update = learner.whole_objective(), config.update
        trial_gradient(learner.policy, learner.optimizer, batches, objective, update, clock)
        plan = report.rl_plan_lines(session, collected, clock.seconds, whole_step=True)
        reader = Reader(
            tokenizer=session.policy.tokenizer,
            stop_ids=session.policy.stop_ids,
            template_file="" if own.policy else config.model.chat_template,
            template_options=config.model.template_options,
        )
        shown = first_step_lines(collected.groups, collected.grades, show_prompts, reader)
        print("\n".join([*plan, "", *shown]))
