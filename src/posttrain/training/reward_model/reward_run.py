"""A run that trains a reward model: a language model's body under a scalar head learns which answers are preferred."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from posttrain.config import RewardModelConfig
from posttrain.config.kinds import resolved_config
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.adapters.peft_layers import require_whole_adapter
from posttrain.models.classifiers.heads import ScoreHead, TextScorer, new_scorer
from posttrain.models.classifiers.saved_classifier import TextReading, require_classifier
from posttrain.models.conversation_masks import Masking
from posttrain.models.loading.devices import require_device_of
from posttrain.models.loading.model_folder import load_policy_to_train
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
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
from posttrain.tasks.preference_set import NO_PAIRS_GIVEN, GivenPairs, PreferenceSet, preference_set
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.reward_model.calibration import HeldOutPairs, held_out_pairs
from posttrain.training.reward_model.pair_scores import PairScores, accumulate_pairs, pair_scores
from posttrain.training.reward_model.reward_report import (
    last_reward_lines,
    pair_preview_lines,
    reward_plan_lines,
    reward_summary,
    write_reward_model,
)
from posttrain.training.reward_model.reward_state import TrainedByPreferences, num_tokens

PREVIEWED = 2
"""Pairs that a dry run shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSession:
    """All that such a run works with."""

    config: RewardModelConfig
    scorer: TextScorer
    model_name: str
    """What the plan calls the body's model."""
    pairs: PreferenceSet
    num_steps: int
    inputs: RunInputs
    optimizer: OwnOptimizer | None = None
    """A caller's, in place of AdamW."""

    @property
    def plan(self) -> list[str]:
        """What the run is about to do."""
        return reward_plan_lines(self.config, self.scorer, self.model_name, self.pairs, num_steps=self.num_steps)

    @property
    def reading(self) -> TextReading:
        """How the saved model is to read texts: as the pairs were."""
        return TextReading(
            stop_token_ids=self.scorer.policy.stop_ids,
            template_options=self.config.model.template_options,
            plain=all(pair.prompt.messages is None for pair in self.pairs.training),
        )

    def measured(self) -> tuple[HeldOutPairs, PairScores]:
        """What the model makes of the held-out pairs, of which there are some, now."""
        options = self.config.reward_model
        scores = pair_scores(self.scorer, self.pairs.held_out, options.tokens_per_microbatch)
        return held_out_pairs(scores, self.pairs.held_out, options.calibration_bins), scores


def train_reward_model(
    config: RewardModelConfig,
    *,
    policy: Policy | None = None,
    head: ScoreHead | None = None,
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Train a reward model on pairs of answers, and save it to RUN/model.

        L = -log σ(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)²      mean over pairs, by their weights

    What is saved is a folder for `AutoModelForSequenceClassification`, and for `rewards: [{model: FOLDER}]`.  For
    callers in Python: `policy` (made by `posttrain.as_policy`) takes the place of the config's model, of which the
    parameters that require a gradient are trained with the head, a new one unless `head` is given, `rows` that of the
    task's file, `held_out_rows` are to be measured on, and `optimizer` takes the place of AdamW.  `watchers` see each
    step, each measurement, each checkpoint and the end.  With `resume` the run in `config.run.folder` goes on from its
    last checkpoint, or with `from_step` from that of an earlier step; with `accept_changes` also where model or rows
    are no longer what they were.
    """
    require_resume(from_step, resume=resume)
    require_trackers(config.run.report_to, config.tracker)
    given = GivenPairs(
        rows=None if rows is None else list(rows), held_out=None if held_out_rows is None else list(held_out_rows)
    )
    config = resolved_config(config, adapter=None if policy is None else trains_adapter(policy.model))
    inputs = inputs_of_pairs(config, policy, given)
    if resume:
        inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=accept_changes)
    watching = require_watchers(watchers)
    with claim_threads(config.run.threads) as threads:
        session = open_reward_model(config, inputs, policy, given)
        if head is not None:
            session = replace(session, scorer=TextScorer(session.scorer.policy, head))
        session = replace(session, optimizer=optimizer)
        options = reward_harness_options(session, watching, from_step=from_step)
        folder = (
            RunFolder.resume(config.run.folder)
            if resume
            else RunFolder.create(config.run.folder, saved_recipe(config), overwrite=config.run.overwrite)
        )
        return fit_pairs(session, folder, threads, options, resume=resume)


def show_reward_plan(config: RewardModelConfig) -> None:
    """Print what a run would be, its first pairs as they are read, and the seconds of one update, taking none."""
    config = resolved_config(config)
    with claim_threads(config.run.threads):
        session = open_reward_model(config, RunInputs(), None, NO_PAIRS_GIVEN)
        batch, began = session.pairs.batch(0, config.reward_model), perf_counter()
        accumulate_pairs(session.scorer, batch, config.reward_model)
        seconds = perf_counter() - began
        print("\n".join(session.plan))
        print(f"time       about {seconds * session.num_steps / 60:.1f} min: {seconds:.2f} s a step")
        print("\n".join(pair_preview_lines(session.scorer.policy, batch[:PREVIEWED])))


def open_reward_model(
    config: RewardModelConfig, inputs: RunInputs, policy: Policy | None, given: GivenPairs
) -> RewardModelSession:
    """Load the body, put a head over it, and read all pairs."""
    name = config.model.path if policy is None else policy.model.name_or_path or "a model object"
    policy = policy or load_policy_to_train(config.model, seed=config.run.seed, saves_whole=True)
    policy.require_as_made()
    require_device_of(policy.device, config.model.device)
    require_whole_adapter(policy.model)
    require_classifier(policy)
    assert isinstance(config.task, DatasetOptions)
    options = config.reward_model
    renderer = renderer_of(policy, config.model.template_options)
    pairs = preference_set(
        Masking.of(policy, renderer),
        config.task,
        options,
        longest=min(options.max_length or policy.max_positions, policy.max_positions),
        seed=config.run.seed,
        given=given,
    )
    return RewardModelSession(
        config=config,
        scorer=new_scorer(policy, seed=config.run.seed),
        model_name=name,
        pairs=pairs,
        num_steps=pairs.num_steps(options) or config.run.num_steps,
        inputs=inputs,
    )


def inputs_of_pairs(config: RewardModelConfig, policy: Policy | None, given: GivenPairs) -> RunInputs:
    """What a run is made of beside its config."""
    own = None
    if policy is not None:
        count = sum(each.numel() for each in policy.model.parameters())
        own = RunInput(f"{class_name(policy.model)} of {count} parameters")
    return inputs_of_rows(config.model, config.task, policy=own, rows=given.rows, held_out_rows=given.held_out)


def fit_pairs(
    session: RewardModelSession,
    folder: RunFolder,
    threads: ThreadClaim,
    harness_options: HarnessOptions,
    *,
    resume: bool = False,
) -> Run:
    """The loop: a batch of pairs, its gradient, a step; measured and saved every so often."""
    options, num_steps = session.config.reward_model, session.num_steps
    seed = session.config.run.seed
    trained = TrainedByPreferences(session.scorer, options, seed=seed, optimizer=session.optimizer)
    with Harness(folder, trained, harness_options) as harness:
        notes = [*(harness.resume(threads) if resume else []), *session.inputs.notes]
        folder.write_inputs(session.inputs)
        folder.write_tokenizer(session.scorer.policy.tokenizer)
        harness.start([*session.plan, *notes])
        if not trained.step:
            folder.append_metrics(0, measure(session, trained, harness))
        with harness.naming_the_step():
            for step in harness.steps():
                with harness.clock("update"):
                    batch = session.pairs.batch(trained.run.next_pair, options)
                    metrics = trained.learn(batch, step, num_steps)
                if step % options.eval_every == 0 or step == num_steps:
                    metrics |= measure(session, trained, harness)
                harness.record(StepReport(step=step, metrics=metrics, num_tokens=num_tokens(batch), pairs=batch))
        finished = trained.step >= num_steps or (harness.told_to_stop and not harness.interruption)
        summary: dict[str, object] = {}
        if finished:
            found = session.measured() if session.pairs.held_out else None
            if found is not None:
                trained.run.saw_evaluation(found[0])  # where it was stopped nothing may have been measured
            summary = {**reward_summary(trained.run), **session.pairs.summary()}
            write_reward_model(session.config, session.scorer, session.reading, folder.path, found)
            if found is not None:
                folder.write_held_out(held_out_rows_of(session.pairs, found[1]))
        harness.end(summary, last_reward_lines(folder.path, trained.run, finished=finished))
    return Run(folder=folder.path, summary=summary, interrupted=not finished)


def held_out_rows_of(pairs: PreferenceSet, scores: PairScores) -> list[Mapping[str, object]]:
    """What was said of each held-out pair, for whoever wants to read those that are judged wrongly."""
    both = zip(scores.chosen.tolist(), scores.rejected.tolist(), strict=True)
    return [
        {"where": pair.where, "chosen": chosen, "rejected": rejected}
        for pair, (chosen, rejected) in zip(pairs.held_out, both, strict=True)
    ]


def measure(session: RewardModelSession, trained: TrainedByPreferences, harness: Harness) -> dict[str, float]:
    """What the model makes of held-out pairs; nothing where none is held out."""
    if not session.pairs.held_out:
        return {}
    with harness.clock("evaluate"):
        found, _ = session.measured()
        metrics = found.metrics()
        harness.evaluated(EvaluationReport(step=trained.step, results=metrics))
    trained.run.saw_evaluation(found)
    return metrics


def reward_harness_options(
    session: RewardModelSession, watchers: Sequence[Watcher] = (), *, from_step: int | None = None
) -> HarnessOptions:
    """What holds such a run together."""
    config = session.config
    return HarnessOptions(
        run=replace(config.run, num_steps=session.num_steps),
        checkpoint=config.checkpoint,
        time_by_stage=False,
        watchers=watchers,
        score=lower_pair_loss,
        config=config,
        from_step=from_step,
        kept_from={"metrics.jsonl": 1},
    )


def lower_pair_loss(metrics: Mapping[str, float]) -> float | None:
    """The best checkpoint is the one whose held-out loss is lowest."""
    loss = metrics.get("eval/loss")
    return None if loss is None else -loss
