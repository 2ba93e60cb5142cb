"""GRPOTrainer and RLOOTrainer: TRL's constructor and methods on the loop of `posttrain.train`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from posttrain.config import Config
from posttrain.environments.method_tools import MethodTools
from posttrain.errors import UserError
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Engine
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.dataset import DatasetOptions
from posttrain.runs.progress import Clock
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.run_inputs import require_same_inputs
from posttrain.runs.run_steps import StartOptions, to_the_end
from posttrain.runs.tracker import require_trackers
from posttrain.tasks.dataset import DatasetTask
from posttrain.training.collector import CollectedStep
from posttrain.training.observations import Observations, token_totals
from posttrain.training.rl import make_ready, train_session
from posttrain.training.session import CallerObjects, Session, inputs_of, open_session
from posttrain.training.update import micro_loss
from posttrain.trl.base_trainer import BaseTrainer
from posttrain.trl.configs.recipe import NO_LIMIT, BatchPlan, RunLength, batch_plan, ratio_level_notes, rl_config
from posttrain.trl.configs.trainer_configs import GRPOConfig, RLOOConfig, SampledFields
from posttrain.trl.log_entries import Entry, Logged, logged_by, sampled_entry, token_entry
from posttrain.trl.model_source import Dataset, Given, Optimizers, PeftConfig, Row
from posttrain.trl.rewards import one_for_each, own_reward, reward_functions

RewardGiven = Callable[..., object] | str | nn.Module
SampledArgs = TypeVar("SampledArgs", bound=SampledFields)
REPLIES_COUNT = (
    "max_completion_length counts the tokens that the model samples, in all turns; TRL counts replies as well.  Turns"
    " are appended to the tokens before them, which are never made anew."
)
PURPOSE = "trl evaluation"
"""The name of an evaluation's random streams: every evaluation of a run uses the same numbers."""


class SampledTrainer(BaseTrainer[SampledArgs]):
    """Trains a model by reward, with the interface of TRL's trainers; `notes` lists the differences to TRL."""

    by_reward = True
    wanted = "give rows, each with a `prompt`"
    loss_remedy = "Write the loss as a LossTerm in an algorithm for posttrain.train."
    only_default: ClassVar[Mapping[str, str]] = {
        "rollout_func": "completions are sampled by the engine; give `environment_factory` or `tools`, or"
        " trainer.engine = an engine of yours"
    }

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: RewardGiven | list[RewardGiven] | None = None,
        args: SampledArgs | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | None = None,
        **not_here: object,
    ) -> None:
        """`not_here` are arguments that only accept their default, such as rollout_func."""
        self.require_defaults(not_here)
        source = model, processing_class, peft_config, quantization_config
        given = Given(*source, callbacks, train_dataset, eval_dataset, optimizers)
        super().__init__(args, given)
        self.notes += [*self.plan.notes, *ratio_level_notes(self.args)]
        self.reward_processing_classes = one_for_each(reward_processing_classes, reward_funcs)
        tokenizers, weights = self.reward_processing_classes, self.args.reward_weights
        self.tools, self.environment_factory = tuple(tools or ()), environment_factory
        of_environment = own_reward(environment_factory, self.tools)
        if reward_funcs is not None or not of_environment:
            state, tokenizer = (lambda: self.state), self.policy.tokenizer
            self.rewards = reward_functions(reward_funcs, tokenizers, weights, tokenizer, state)
        else:
            self.rewards = []
        self.rewards += of_environment
        if self.replies:
            self.notes.append(REPLIES_COUNT)
        self.engine: Engine | None = None
        """An engine set by a script, instead of the in-process one."""
        self.session: Session | None = None
        """Whether train() or evaluate() is running."""
        self._finish_init()

    @property
    def plan(self) -> BatchPlan:
        """The batches in our terms, from the current arguments, which a script may have changed."""
        return batch_plan(self.args)

    def objects(self, rows: Sequence[Row]) -> CallerObjects:
        return CallerObjects(
            policy=self.policy,
            engine=self.engine,
            rewards=self.rewards,
            rows=rows,
            optimizer=self.own_optimizer,
            tools=self.tools,
            environment=None if self.environment_factory is None else MethodTools(self.environment_factory),
        )

    @property
    def replies(self) -> bool:
        """Whether tools, or an environment's methods, reply to completions."""
        return bool(self.tools) or self.environment_factory is not None

    def length(self, num_rows: int) -> RunLength:
        return self.plan.length(self.args, num_rows)

    def recipe(self, rows: list[Row], length: RunLength) -> Config:
        """The config with micro-batches that fit as many rows as TRL has on a device, at their longest."""
        config = rl_config(self.args, self.model_options, self.plan, length)
        if self.replies:
            most = getattr(self.args, "max_tool_calling_iterations", None)
            turns = NO_LIMIT if most is None else most + 1
            config = replace(config, rollout=replace(config.rollout, max_turns=turns, multi_turn="append"))
        task = rows_task(rows, config.task, self.policy, config.model.template_options)
        longest = max(len(prompt.tokens) for prompt in task.longest_prompts())
        tokens = self.args.per_device_train_batch_size * (longest + config.rollout.max_completion_tokens)
        return replace(config, update=replace(config.update, tokens_per_microbatch=max(2, tokens)))

    def rows(self, given: Dataset | None, name: str) -> list[Row]:
        rows = super().rows(given, name)
        require_prompts(rows, name)
        return rows

    def rows_to_draw(self) -> int | None:
        """Number of rows that a run of max_steps reads; None if epochs define its length."""
        most, plan = self.args.max_steps, self.plan
        return -(-most // plan.updates_per_step) * plan.prompts_per_step if most > 0 else None

    def _fit(self, config: Config, **given: Any) -> Run:
        require_trackers(config.run.report_to, config.tracker)
        objects = self.objects(given["rows"])
        start = StartOptions(watchers=given["watchers"], resume=given["resume"], from_step=given["from_step"])
        inputs = inputs_of(config, objects)
        if start.resume:
            inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=False)
        try:
            with open_session(config, objects) as self.session:
                make_ready(self.session)
                return to_the_end(train_session(self.session, inputs, start))
        finally:
            self.session = None

    def _entry(self, report: StepReport) -> Entry:
        assert report.grades is not None, "a step by reward"
        plan, logged, metrics = self.plan, logged_by(self.args), report.metrics
        # A step without an advantage has no gradient and takes no update.
        entry: Entry = {name: metrics.get(name, 0.0) for name in ("loss", "grad_norm")}
        entry |= {name: metrics[name] for name in ("learning_rate", "num_tokens") if name in metrics}
        entry |= sampled_entry(report.groups, report.grades, logged)
        share = logged.trained_share(
            tokens=metrics.get("tokens/trained", 0.0),
            completions=metrics.get("completions/trained", 0.0),
            groups=report.groups,
            passes=plan.epochs_per_step,
        )
        entry |= token_entry(metrics, logged, trained_share=share)
        entry |= logged.penalised_kl(report.groups, report.token_rewards)
        return entry | {"step_time": sum(report.seconds.values()) / plan.updates_per_step}

    def _measured(self, rows: list[Row]) -> Entry:
        """Completions of some rows at the training temperature, scored."""
        if self.session is not None:
            return self._measured_in(self.session, rows)
        with open_session(self.described(rows)[0], self.objects(rows)) as session:
            session.load_weights()
            return self._measured_in(session, rows)

    def _measured_in(self, session: Session, rows: list[Row]) -> Entry:
        config, logged = session.config, logged_by(self.args)
        size = self.args.num_generations_eval or self.plan.group_size
        task = rows_task(rows, config.task, session.policy, config.model.template_options)
        request = GroupRequest(
            group_size=size,
            max_completion_tokens=config.rollout.max_completion_tokens,
            sampling=config.rollout.sampling,
            key=StreamKey(config.run.seed, PURPOSE, 0),
        )
        prompts, workers = [task.prompt(row) for row in task.training_rows], session.environment.workers
        groups = sample_conversations(session.engine, prompts, request, workers)
        grades = session.collector.grade(groups)
        if workers is not None:
            workers.end_of(groups)
        collected = CollectedStep(step=max(1, session.trained.step), groups=groups, grades=grades)
        entry: Entry = loss_entry(session, collected, logged) if size > 1 else {"loss": None}
        return entry | sampled_entry(groups, grades, logged)


class GRPOTrainer(SampledTrainer[GRPOConfig]):
    """Trains a model by reward with GRPO and its variants, with the interface of TRL's class.

    trainer = GRPOTrainer(model=PATH, reward_funcs=solved, args=GRPOConfig(...), train_dataset=rows)
    trainer.train()
    """

    config_class = GRPOConfig


class RLOOTrainer(SampledTrainer[RLOOConfig]):
    """Trains a model by reward with RLOO, with the interface of TRL's class."""

    config_class = RLOOConfig


def require_prompts(rows: Sequence[Row], name: str) -> None:
    """Reject a row without the column `prompt`, unless all rows have their prompts in `messages` or in preferences."""
    columns = {column for row in rows for column in row}
    if "prompt" not in columns and ("messages" in columns or {"chosen", "rejected"} <= columns):
        return
    for number, row in enumerate(rows):
        if row.get("prompt") in (None, "", []):
            lack = "empty" if "prompt" in row else f"missing; it has {', '.join(row) or 'no columns'}"
            remedy = f"Give every row a prompt, such as by {name}.rename_column('question', 'prompt')."
            raise UserError(f"{name}: row {number}: the column `prompt` is {lack}.  {remedy}")


def rows_task(rows: Sequence[Row], options: Any, policy: Policy, template: Mapping[str, object]) -> DatasetTask:
    """The rows as a task, none of them held out."""
    assert isinstance(options, DatasetOptions)
    return DatasetTask(options, renderer_of(policy, template), seed=0, prompts_per_step=1, rows=rows)


@torch.no_grad()
def loss_entry(session: Session, collected: CollectedStep, logged: Logged) -> Entry:
    """The initial loss of an update on these completions, a mean over mini-batches, and its metrics."""
    learner, clock = session.learner, Clock()
    credited = learner.credit(collected, clock)
    batches = learner.batches(credited, clock)
    batches = batches[: len(batches) // learner.passes.epochs]  # one pass
    budget, padded = learner.settings.update.tokens_per_microbatch, learner.policy.forward.padded
    total, observed = 0.0, Observations()
    micros = [micro for batch in batches if batch.completions for micro in batch.split(budget, padded=padded)]
    for micro in micros:
        total += micro_loss(learner.policy, micro, learner.objective(), observed).item()
    Observations.read([observed])
    entry: Entry = {"loss": total / len(batches)}
    kl = logged.penalised_kl(collected.groups, credited.token_rewards)
    if not micros:  # no completion has an advantage
        return entry | token_entry({}, logged, trained_share=0.0) | kl
    totals = token_totals(micros, observed)
    means = {name: value / totals["num_tokens"] for name, value in totals["sums"].items()}
    means |= {name: value / totals["num_completions"] for name, value in totals["completion_sums"].items()}
    tokens, completions = float(totals["num_tokens"]), float(totals["num_completions"])
    share = logged.trained_share(tokens=tokens, completions=completions, groups=collected.groups)
    return entry | token_entry(means, logged, trained_share=share) | kl
