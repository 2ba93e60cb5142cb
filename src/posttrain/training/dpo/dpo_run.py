"""A run on pairs of answers: a policy is to like the chosen one better than the rejected one, beside a reference."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from posttrain.config import DpoConfig
from posttrain.config.kinds import resolved_config
from posttrain.errors import UserError
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.conversation_masks import Masking
from posttrain.models.loading.devices import require_device_of
from posttrain.models.loading.model_folder import load_policy_to_train
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
from posttrain.runs.clock import Clock
from posttrain.runs.folder import saved_recipe
from posttrain.runs.harness import Harness, HarnessOptions, require_resume
from posttrain.runs.reports import Run
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_inputs import RunInputs, require_same_inputs
from posttrain.runs.threads import claim_threads
from posttrain.runs.trackers.tracker import require_trackers
from posttrain.runs.watchers import Watcher, require_watchers
from posttrain.tasks.base import Task
from posttrain.tasks.preference_set import GivenPairs, preference_set
from posttrain.training.caller.caller_inputs import inputs_of, weighed_policy
from posttrain.training.caller.caller_objects import CallerObjects, Rewards, Rows
from posttrain.training.collector import no_journal
from posttrain.training.dpo.dpo_report import (
    dpo_plan_lines,
    dpo_summary,
    interrupted_lines,
    last_lines,
    preview_lines,
    write_model,
)
from posttrain.training.dpo.dpo_state import TrainedOnPairs
from posttrain.training.dpo.pair_sources import PairSource, RoundPairs, RowPairs, step_report
from posttrain.training.dpo.pair_update import accumulate
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.reference import Reference, UncopiedPolicy
from posttrain.training.report import held_out_metrics
from posttrain.training.session import open_session

PREVIEWED = 2
"""Pairs that a dry run shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoSession:
    """All that a run on pairs works with."""

    config: DpoConfig
    policy: Policy
    model_name: str
    """What the plan calls the policy's model."""
    source: PairSource

    @property
    def plan(self) -> list[str]:
        """What the run is about to do."""
        source = self.source
        return dpo_plan_lines(self.config, self.policy, self.model_name, source.described(), num_steps=source.num_steps)


def train_dpo(
    config: DpoConfig,
    *,
    policy: Policy | None = None,
    task: Task | None = None,
    rewards: Rewards = (),
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    reference: Policy | Reference | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Make a policy like the chosen answers of pairs better than the rejected ones, and save it to RUN/model.

    The pairs are rows with `chosen` and `rejected`, or, with `dpo.rounds`, the best and worst of the policy's own
    completions by some rewards.  The objects are those of `posttrain.train`; of rows, `rows` have two answers each and
    `held_out_rows` are to be measured on.  `reference` takes the place of the policy that training starts from, and
    `optimizer` that of AdamW.  With `resume` the run in `config.run.folder` goes on from its last checkpoint, within a
    round too, to the same bits as if it had never stopped.
    """
    require_resume(from_step, resume=resume)
    require_trackers(config.run.report_to, config.tracker)
    own = CallerObjects(
        policy=policy, task=task, rewards=rewards, rows=rows, held_out_rows=held_out_rows, optimizer=optimizer
    )
    compared = given_reference(reference, config)
    config = resolved_config(config, adapter=None if policy is None else trains_adapter(policy.model))
    inputs = inputs_of_dpo(config, own, reference)
    if resume:
        inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=accept_changes)
    watching = require_watchers(watchers)
    with claim_threads(config.run.threads) as threads, opened(config, own) as session:
        options = dpo_harness_options(session, watching, from_step=from_step)
        folder = (
            RunFolder.resume(config.run.folder)
            if resume
            else RunFolder.create(config.run.folder, saved_recipe(config), overwrite=config.run.overwrite)
        )
        trained = TrainedOnPairs(
            session.policy, config.dpo, session.source.pairs, reference=compared, optimizer=optimizer
        )
        with Harness(folder, trained, options) as harness:
            notes = [*(harness.resume(threads) if resume else []), *inputs.notes]
            folder.write_inputs(inputs)
            folder.write_tokenizer(session.policy.tokenizer)
            harness.start([*session.plan, *notes])
            return fit(session, trained, harness)


def fit(session: DpoSession, trained: TrainedOnPairs, harness: Harness) -> Run:
    """The loop: pairs, their gradient, a step; a round's pairs where one begins; measured and saved every so often."""
    source, folder = session.source, harness.folder
    if not trained.step:
        metrics = source.begin(trained, harness)
        folder.append_metrics(0, metrics)
        harness.progress.compare_with(metrics)
    with harness.naming_the_step():
        for step in harness.steps():
            sampled = source.before_step(step, trained, harness)
            tokens = trained.run.num_tokens
            with harness.clock("update"):
                metrics = trained.learn(step, source.num_steps)
            metrics |= source.measured(trained, harness)
            harness.record(step_report(trained, metrics, sampled, num_tokens=trained.run.num_tokens - tokens))
    if harness.interruption:
        harness.end({}, interrupted_lines(folder.path, trained.step, harness.interruption.reason))
        return Run(folder=folder.path, summary={}, interrupted=True)
    return conclude(session, trained, harness)


def conclude(session: DpoSession, trained: TrainedOnPairs, harness: Harness) -> Run:
    """Measure what training made of the policy, save the model, and say what came out."""
    source, folder = session.source, harness.folder
    transcripts: list[list[str]] = []
    if isinstance(source, RowPairs) and (metrics := source.measured_at_end(trained, harness)):
        folder.append_metrics(trained.step, metrics)
    if isinstance(source, RoundPairs):
        trained.run.after, transcripts = source.measured_in_full(trained, harness, "after")
        if trained.run.after["num_problems"]:
            probes = source.session.questions().probes
            folder.append_metrics(trained.step, held_out_metrics(trained.run.after, probes))
        trained.add_seconds(harness.clock.seconds)
    summary = {**dpo_summary(session.config, session.policy, trained), **source.summary()}
    write_model(session.config, session.policy, folder.path, session.model_name)
    probes = source.session.questions().probes if isinstance(source, RoundPairs) else {}
    shown = (trained.run.transcripts, transcripts)
    harness.end(summary, last_lines(folder.path, trained, summary, probes, shown))
    return Run(folder=folder.path, summary=summary)


@contextmanager
def opened(config: DpoConfig, own: CallerObjects) -> Iterator[DpoSession]:
    """Load the model, and read all pairs or make what samples and judges them."""
    with ExitStack() as stack:
        if config.dpo.rounds:
            session = stack.enter_context(open_session(config.sampling_half(), own))
            rounds = RoundPairs(config=config, session=session)
            rounds.require_sound()
            yield DpoSession(config=config, policy=session.policy, model_name=session.model_name, source=rounds)
            return
        policy = own.policy or load_policy_to_train(config.model, seed=config.run.seed)
        policy.require_as_made()
        require_device_of(policy.device, config.model.device)
        name = config.model.path if own.policy is None else policy.model.name_or_path or "a model object"
        yield DpoSession(config=config, policy=policy, model_name=name, source=row_pairs(config, policy, own))


def row_pairs(config: DpoConfig, policy: Policy, own: CallerObjects) -> RowPairs:
    """The pairs of the recipe's rows, or of the caller's."""
    assert isinstance(config.task, DatasetOptions), "a rule of the config"
    renderer = renderer_of(policy, config.model.template_options)
    pairs = preference_set(
        Masking.of(policy, renderer),
        config.task,
        config.dpo,
        longest=min(config.dpo.max_length or policy.max_positions, policy.max_positions),
        seed=config.run.seed,
        given=GivenPairs(rows=own.rows, held_out=own.held_out_rows),
    )
    num_steps = pairs.num_steps(config.dpo) or config.run.num_steps
    return RowPairs(pairs=pairs, options=config.dpo, num_steps=num_steps)


def given_reference(given: Policy | Reference | None, config: DpoConfig) -> Reference | None:
    """What a caller has a policy compared with.  Raises UserError where each round has a reference of its own."""
    if given is not None and config.dpo.refresh_reference:
        raise UserError(
            "reference: one is given, and dpo.refresh_reference takes a new one in each round.  Leave one of them out."
        )
    return UncopiedPolicy(given) if isinstance(given, Policy) else given


def inputs_of_dpo(config: DpoConfig, own: CallerObjects, reference: Policy | Reference | None = None) -> RunInputs:
    """What a run is made of beside its config; policy objects by their weights too, as these are the reference's."""
    inputs = inputs_of(config.sampling_half(), own)
    weighed = {"policy": own.policy, "reference": reference}
    objects = {name: weighed_policy(each) for name, each in weighed.items() if isinstance(each, Policy)}
    return replace(inputs, objects={**inputs.objects, **objects})


def dpo_harness_options(
    session: DpoSession, watchers: Sequence[Watcher] = (), *, from_step: int | None = None
) -> HarnessOptions:
    """What holds a run on pairs together."""
    config = session.config
    return HarnessOptions(
        run=replace(config.run, num_steps=session.source.num_steps),
        checkpoint=config.checkpoint,
        watchers=watchers,
        score=ranked_best,
        config=config,
        from_step=from_step,
        kept_from={"metrics.jsonl": 1},
    )


def ranked_best(metrics: Mapping[str, float]) -> float | None:
    """The best checkpoint has the highest held-out accuracy, of rounds; of rows it ranks the most pairs right."""
    return metrics.get("eval/accuracy_sampled", metrics.get("eval/pairs/accuracy"))


def show_dpo_plan(config: DpoConfig) -> None:
    """Print what a run would be, its first pairs, and the seconds of one update, taking none."""
    config = resolved_config(config)
    with claim_threads(config.run.threads), opened(config, CallerObjects()) as session:
        trained = TrainedOnPairs(session.policy, config.dpo, session.source.pairs)
        lines, pairs = [*session.plan], trained.pairs
        if isinstance(session.source, RoundPairs):
            session.source.load_weights(trained)
            began = perf_counter()
            collected = session.source.session.collector.collect(1, no_journal, Clock())
            sampled = session.source.paired(1, collected)
            pairs = replace(pairs, training=sampled.pairs)
            lines.append(
                f"round      {perf_counter() - began:.1f} s to sample and judge one: {len(sampled.pairs)} pairs,"
                f" {sampled.num_tied} of {len(sampled.groups)} groups are ties"
            )
        if pairs.training:
            began = perf_counter()
            batch = pairs.batch(0, config.dpo)
            reference = trained.reference.now(batch)
            accumulate(session.policy, batch, reference, trained.objective, config.dpo.tokens_per_microbatch)
            seconds = perf_counter() - began
            lines.append(
                f"time       about {seconds * session.source.num_steps / 60:.1f} min for updates: {seconds:.2f} s each"
            )
            lines += preview_lines(session.policy, batch[:PREVIEWED])
        print("\n".join(lines))
