"""A supervised run: a model, new or one's own, learns demonstrations or rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

from posttrain.config import SftConfig
from posttrain.config.kinds import resolved_config
from posttrain.errors import UserError
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.adapters.peft_layers import require_whole_adapter
from posttrain.models.conversation_masks import Masking
from posttrain.models.loading.devices import require_device_of
from posttrain.models.loading.model_folder import load_policy_to_train
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example
from posttrain.runs.folder import saved_recipe
from posttrain.runs.harness import Harness, HarnessOptions, require_resume
from posttrain.runs.named_inputs import inputs_of_rows
from posttrain.runs.reports import EvaluationReport, Run, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.run_inputs import RunInput, RunInputs, class_name, require_same_inputs
from posttrain.runs.threads import ThreadClaim, claim_threads
from posttrain.runs.trackers.tracker import require_trackers
from posttrain.runs.watchers import Watcher, require_watchers
from posttrain.tasks.dataset import Rows
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.sft.demonstration_set import DemonstrationSet, demonstrations_of
from posttrain.training.sft.learned_rows import NOTHING_GIVEN, GivenRows, row_examples
from posttrain.training.sft.sft_report import last_lines, preview_lines, sft_plan_lines, summary_of, write_model
from posttrain.training.sft.sft_state import TrainedBySupervision
from posttrain.training.sft.supervised import accumulate, held_out_loss

PREVIEWED = 2
"""Examples that a dry run shows."""


class ExampleSource(Protocol):
    """What there is to learn from."""

    def batch(self, first: int, options: SftOptions) -> list[Example]:
        """The examples of an update, from a number on that counts them from the beginning of the run."""
        ...

    def held_out(self, options: SftOptions) -> list[Example]:
        """Examples that are never trained on; there may be none."""
        ...

    def num_steps(self, options: SftOptions) -> int | None:
        """Updates until the end, where the examples themselves say so."""
        ...

    def described(self) -> Sequence[str]:
        """What the plan says of them, in lines."""
        ...

    def summary(self) -> Mapping[str, object]:
        """What summary.json says of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSession:
    """All that a supervised run works with."""

    config: SftConfig
    policy: Policy
    model_name: str
    """What the plan calls the policy's model."""
    source: ExampleSource
    held_out: Sequence[Example]
    num_steps: int
    inputs: RunInputs
    optimizer: OwnOptimizer | None = None
    """Of the caller, in place of AdamW."""

    @property
    def plan(self) -> list[str]:
        """What the run is about to do."""
        return sft_plan_lines(
            self.config,
            self.policy,
            self.model_name,
            self.source.described(),
            num_held_out=len(self.held_out),
            num_steps=self.num_steps,
        )


def train_sft(
    config: SftConfig,
    *,
    policy: Policy | None = None,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Train a model on demonstrations or on rows, and save it to RUN/model.

    The loss is the mean of -log π over learned tokens; the others are read and not learned.  For callers in Python:
    `policy` (made by `posttrain.as_policy`) takes the place of the config's model, of which the parameters that require
    a gradient are trained, `rows` that of the task's file, `held_out_rows` are to be measured on, and `optimizer` takes
    the place of AdamW.  `watchers` see each step, each measurement, each checkpoint and the end.  With `resume` the run
    in `config.run.folder` goes on from its last checkpoint, or with `from_step` from that of an earlier step; with
    `accept_changes` also where model or rows are no longer what they were.
    """
    require_resume(from_step, resume=resume)
    require_trackers(config.run.report_to, config.tracker)
    given = GivenRows(
        rows=None if rows is None else list(rows), held_out=None if held_out_rows is None else list(held_out_rows)
    )
    inputs = inputs_of_sft(config, policy, given)
    config = resolved_config(config, adapter=None if policy is None else trains_adapter(policy.model))
    if resume:
        inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=accept_changes)
    watching = require_watchers(watchers)
    with claim_threads(config.run.threads) as threads:
        session = open_sft(config, inputs, policy, given)
        options = sft_harness_options(session, watching, from_step=from_step)
        folder = (
            RunFolder.resume(config.run.folder)
            if resume
            else RunFolder.create(config.run.folder, saved_recipe(config), overwrite=config.run.overwrite)
        )
        return fit(replace(session, optimizer=optimizer), folder, threads, options, resume=resume)


def show_sft_plan(config: SftConfig) -> None:
    """Print what a run would be, its first rows as they are learned, and the seconds of one update, taking none."""
    config = resolved_config(config)
    with claim_threads(config.run.threads):
        session = open_sft(config, RunInputs(), None, NOTHING_GIVEN)
        batch, began = session.source.batch(0, config.sft), perf_counter()
        accumulate(session.policy, batch, config.sft.tokens_per_microbatch)
        seconds = perf_counter() - began
        print("\n".join(session.plan))
        print(f"time       about {seconds * session.num_steps / 60:.1f} min: {seconds:.2f} s a step")
        print("\n".join(preview_lines(session.policy, batch[:PREVIEWED])))


def open_sft(config: SftConfig, inputs: RunInputs, policy: Policy | None, given: GivenRows) -> SftSession:
    """Load or make the model, and read all there is to learn from."""
    if policy is not None:
        name = policy.model.name_or_path or "a model object"
        if isinstance(config.model, ModelOptions):
            require_device_of(policy.device, config.model.device)
    else:
        name = config.model.path if isinstance(config.model, ModelOptions) else "new"
        policy = sft_policy(config)
    policy.require_as_made()
    require_whole_adapter(policy.model)
    source = example_source(config, policy, given)
    num_steps = source.num_steps(config.sft) or config.run.num_steps
    return SftSession(
        config=config,
        policy=policy,
        model_name=name,
        source=source,
        held_out=source.held_out(config.sft),
        num_steps=num_steps,
        inputs=inputs,
    )


def sft_policy(config: SftConfig) -> Policy:
    """The model of the recipe, from its folder or from nothing."""
    if isinstance(config.model, ModelOptions):
        return load_policy_to_train(config.model, seed=config.run.seed)
    tokenizer = new_tokenizer(config.model.template)
    return as_policy(new_model(config.model, tokenizer, seed=config.run.seed), tokenizer)


def example_source(config: SftConfig, policy: Policy, given: GivenRows) -> ExampleSource:
    """The rows of the recipe, or of the caller, or the demonstrations of its task."""
    options = config.model.template_options if isinstance(config.model, ModelOptions) else {}
    most_tokens = None if config.sft.long_rows == "cut" else policy.max_positions  # to be cut, all is read
    renderer = TokenizerRenderer(policy.tokenizer, template_options=options, most_tokens=most_tokens)
    if isinstance(config.task, DatasetOptions):
        return row_examples(
            Masking.of(policy, renderer),
            config.task,
            config.sft,
            longest=min(config.sft.max_length or policy.max_positions, policy.max_positions),
            seed=config.run.seed,
            given=given,
        )
    if given != NOTHING_GIVEN:
        raise UserError(
            f"rows: the task is {config.task.name}, which makes demonstrations of its own.  Use task ="
            ' {"name": "dataset"}.'
        )
    return DemonstrationSet(
        policy=policy,
        demonstrations=demonstrations_of(config.task, config.demonstrator, renderer, seed=config.run.seed),
        seed=config.run.seed,
        num_different=config.sft.num_demonstrations,
    )


def inputs_of_sft(config: SftConfig, policy: Policy | None, given: GivenRows) -> RunInputs:
    """What a run is made of beside its config."""
    own = None if policy is None else policy_input(policy)
    return inputs_of_rows(config.model, config.task, policy=own, rows=given.rows, held_out_rows=given.held_out)


def policy_input(policy: Policy) -> RunInput:
    """A policy that a caller brings."""
    count = sum(each.numel() for each in policy.model.parameters())
    return RunInput(f"{class_name(policy.model)} of {count} parameters")


def fit(
    session: SftSession,
    folder: RunFolder,
    threads: ThreadClaim,
    harness_options: HarnessOptions,
    *,
    resume: bool = False,
) -> Run:
    """The loop: a batch of examples, its gradient, a step; measured and saved every so often."""
    source, options, num_steps = session.source, session.config.sft, session.num_steps
    seed = session.config.run.seed
    trained = TrainedBySupervision(session.policy, options, seed=seed, optimizer=session.optimizer)
    with Harness(folder, trained, harness_options) as harness:
        notes = [*(harness.resume(threads) if resume else []), *session.inputs.notes]
        folder.write_inputs(session.inputs)
        folder.write_tokenizer(session.policy.tokenizer)
        harness.start([*session.plan, *notes])
        if not trained.step:
            folder.append_metrics(0, measured(session, trained, harness))
        with harness.naming_the_step():
            for step in harness.steps():
                with harness.clock("update"):
                    batch = source.batch(trained.run.next_example, options)
                    metrics = trained.learn(batch, step, num_steps)
                if step % options.eval_every == 0 or step == num_steps:
                    metrics |= measured(session, trained, harness)
                tokens = sum(len(example.tokens) for example in batch)
                harness.record(StepReport(step=step, metrics=metrics, num_tokens=tokens))
        finished = trained.step >= num_steps or (harness.told_to_stop and not harness.interruption)
        summary: dict[str, object] = {}
        if finished:
            write_model(session.config, session.policy, folder.path)
            summary = {**summary_of(trained.run), **source.summary()}
        harness.end(summary, last_lines(session.config, folder.path, trained.run, finished=finished))
    return Run(folder=folder.path, summary=summary, interrupted=not finished)


def measured(session: SftSession, trained: TrainedBySupervision, harness: Harness) -> dict[str, float]:
    """The held-out loss and what goes with it; nothing where nothing is held out."""
    if not session.held_out:
        return {}
    with harness.clock("evaluate"):
        found = held_out_loss(session.policy, session.held_out, session.config.sft.tokens_per_microbatch)
        metrics = found.metrics()
        harness.evaluated(EvaluationReport(step=trained.step, results=metrics))
    trained.run.saw_evaluation(found)
    return metrics


def sft_harness_options(
    session: SftSession, watchers: Sequence[Watcher] = (), *, from_step: int | None = None
) -> HarnessOptions:
    """What holds a supervised run together."""
    config = session.config
    return HarnessOptions(
        run=replace(config.run, num_steps=session.num_steps),
        checkpoint=config.checkpoint,
        time_by_stage=False,
        watchers=watchers,
        score=lower_loss,
        config=config,
        from_step=from_step,
        kept_from={"metrics.jsonl": 1},
    )


def lower_loss(metrics: Mapping[str, float]) -> float | None:
    """The best checkpoint is the one whose held-out loss is lowest."""
    loss = metrics.get("eval/loss")
    return None if loss is None else -loss
