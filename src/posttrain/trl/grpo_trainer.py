"""GRPOTrainer and RLOOTrainer: TRL's constructor and methods over the loop of `posttrain.train`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.config import Config
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.options.dataset import DatasetOptions
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.run_inputs import require_same_inputs
from posttrain.runs.trackers.tracker import require_trackers
from posttrain.training.caller.caller_inputs import inputs_of
from posttrain.training.caller.caller_objects import CallerObjects
from posttrain.training.rl import Beginning, make_ready, to_the_end, train_session
from posttrain.training.session import Session, open_session
from posttrain.trl.as_config import RunLength, ratio_level_notes, rl_config
from posttrain.trl.base_trainer import BaseTrainer, Given, Optimizers, Start
from posttrain.trl.batch_arithmetic import BatchPlan, batch_plan
from posttrain.trl.fields.grpo_config import GRPO_RULES, GRPOConfig, SampledFields
from posttrain.trl.fields.rloo_config import RLOO_RULES, RLOOConfig
from posttrain.trl.held_out import evaluation_entry
from posttrain.trl.log_entries import Entry, logged_by, step_entry
from posttrain.trl.reward_texts import one_for_each, reward_functions
from posttrain.trl.training_rows import Dataset, Row, longest_prompt, require_prompts

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

NOT_HERE = {
    "tools": "completions call no tools here",
    "rollout_func": "completions are sampled by the engine; posttrain.train takes one of yours",
    "environment_factory": "a completion is one turn here; give a reward function",
}
"""Arguments of TRL's trainers of which only the default is possible, with why."""
RewardGiven = Callable[..., object] | str | nn.Module
"""A function, a reward model, or the folder or name of one."""


SampledArgs = TypeVar("SampledArgs", bound=SampledFields)


class SampledTrainer(BaseTrainer[SampledArgs]):
    """Trains a model by reward, called as TRL's trainers are; the loop is that of `posttrain.train`.

    Where TRL would do something else, a line says so when the trainer is made; `notes` keeps these lines.
    """

    by_reward = True
    wanted = "give rows, each with a `prompt`"
    loss_remedy = "Write the loss as a LossTerm in an algorithm for posttrain.train."
    only_default = NOT_HERE

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: RewardGiven | list[RewardGiven],
        args: SampledArgs | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "LoraConfig | None" = None,
        **not_here: object,
    ) -> None:
        """`not_here` are arguments that only accept their default, such as tools and rollout_func."""
        self.require_defaults(not_here)
        given = Given(
            model=model,
            processing_class=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
            callbacks=callbacks,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            optimizers=optimizers,
        )
        super().__init__(args, given)
        self.notes += [*self.plan.notes, *ratio_level_notes(self.args)]
        self.reward_processing_classes = one_for_each(reward_processing_classes, reward_funcs)
        """The tokenizer that each reward was given, None where it has its own or none."""
        self.rewards = reward_functions(
            reward_funcs,
            self.reward_processing_classes,
            self.args.reward_weights,
            self.policy.tokenizer,
            lambda: self.state,
        )
        self.engine: Engine | None = None
        """An engine of your own, in place of the one in this process."""
        self.session: Session | None = None
        """While train() or evaluate() is going on."""
        self.tell()

    @property
    def plan(self) -> BatchPlan:
        """Batches in our words, by the arguments as they are now: a script may have changed some."""
        return batch_plan(self.args, self.rules)

    def objects(self, rows: Sequence[Row]) -> CallerObjects:
        """What a session gets besides its config."""
        return CallerObjects(
            policy=self.policy,
            engine=self.engine,
            rewards=self.rewards,
            rows=rows,
            optimizer=self.own_optimizer,
        )

    def length(self, num_rows: int) -> RunLength:
        """How long a run over so many prompts is."""
        plan = self.plan
        return RunLength(
            updates=plan.num_updates(self.args, num_rows),
            updates_per_step=plan.updates_per_step,
            updates_per_epoch=plan.updates_per_epoch(num_rows),
        )

    def recipe(self, rows: list[Row], length: RunLength) -> Config:
        """The run in our words."""
        config = rl_config(self.args, self.model_options, self.plan, length)
        return with_room(config, self.args, self.policy, rows)

    def rows(self, given: Dataset | None, name: str) -> list[Row]:
        """The rows of a dataset, each with its prompt."""
        rows = super().rows(given, name)
        require_prompts(rows, name)
        return rows

    def rows_to_draw(self) -> int | None:
        """Rows that a run of max_steps reads; None where epochs say how long it is."""
        most, plan = self.args.max_steps, self.plan
        return plan.num_steps(most) * plan.prompts_per_step if most > 0 else None

    def _fit(self, config: Config, rows: list[Row], start: Start) -> Run:
        """The run by the loop of `posttrain.train`."""
        require_trackers(config.run.report_to, config.tracker)
        own = self.objects(rows)
        inputs = inputs_of(config, own)
        if start.resume:
            inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=False)
        try:
            with open_session(config, own) as self.session:
                make_ready(self.session)
                return to_the_end(train_session(self.session, inputs, Beginning(**start.how)))
        finally:
            self.session = None

    def _entry(self, report: StepReport) -> Entry:
        """What a step logs."""
        plan = self.plan
        logged = logged_by(self.args)
        return step_entry(report, logged=logged, updates=plan.updates_per_step, passes=plan.epochs_per_step)

    def _measured(self, rows: list[Row]) -> Entry:
        """Completions of some rows at the training temperature, scored."""
        if self.session is not None:
            return self._measured_in(self.session, rows)
        with open_session(self.described(rows)[0], self.objects(rows)) as session:
            session.load_weights()
            return self._measured_in(session, rows)

    def _measured_in(self, session: Session, rows: list[Row]) -> Entry:
        """The same in a session."""
        return evaluation_entry(
            session, rows, self.args.num_generations_eval or self.plan.group_size, logged_by(self.args)
        )


class GRPOTrainer(SampledTrainer[GRPOConfig]):
    """Trains a model by reward with GRPO and its variants, called as TRL's class of that name.

    trainer = GRPOTrainer(model=PATH, reward_funcs=solved, args=GRPOConfig(...), train_dataset=rows)
    trainer.train()
    """

    config_class, own_rules = GRPOConfig, GRPO_RULES


class RLOOTrainer(SampledTrainer[RLOOConfig]):
    """Trains a model by reward with RLOO, called as TRL's class of that name."""

    config_class, own_rules = RLOOConfig, RLOO_RULES


def with_room(config: Config, args: SampledFields, policy: Policy, rows: Sequence[Row]) -> Config:
    """The config with micro-batches of as many rows as TRL has on a device, of the longest there are."""
    assert isinstance(config.task, DatasetOptions)
    longest = longest_prompt(rows, config.task, policy, config.model.template_options)
    tokens = args.per_device_train_batch_size * (longest + config.rollout.max_completion_tokens)
    return replace(config, update=replace(config.update, tokens_per_microbatch=max(2, tokens)))
