"""GRPOTrainer and RLOOTrainer: TRL's constructor and methods over the loop of `posttrain.train`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput

from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.options.dataset import DatasetOptions
from posttrain.runs.run_inputs import require_same_inputs
from posttrain.runs.trackers.tracker import require_trackers
from posttrain.training.caller.caller_inputs import inputs_of
from posttrain.training.caller.caller_objects import CallerObjects
from posttrain.training.optimizer import OwnOptimizer, new_optimizer
from posttrain.training.rl import Beginning, make_ready, to_the_end, train_session
from posttrain.training.session import Session, open_session
from posttrain.trl.as_config import RunLength, ratio_level_notes, require_strategies, rl_config
from posttrain.trl.batch_arithmetic import batch_plan
from posttrain.trl.callback_watcher import CallbackWatcher
from posttrain.trl.fields.field_rules import Rules
from posttrain.trl.fields.grpo_config import GRPO_RULES, GRPOConfig, SampledFields
from posttrain.trl.fields.rloo_config import RLOO_RULES, RLOOConfig
from posttrain.trl.fields.told_in_fields import told_in_fields
from posttrain.trl.held_out import evaluation_entry
from posttrain.trl.log_entries import logged_by, prefixed, step_entry
from posttrain.trl.model_source import ModelSource, default_folder
from posttrain.trl.reward_texts import one_for_each, reward_functions
from posttrain.trl.saved_models import require_free, resume_step
from posttrain.trl.surface.checked_overrides import overrides
from posttrain.trl.surface.names_elsewhere import unknown_argument_message
from posttrain.trl.trainer_methods import TrainerMethods
from posttrain.trl.training_rows import Dataset, Row, longest_prompt, require_prompts, rows_of_dataset

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

RewardGiven = Callable[..., object] | str | nn.Module
"""A function, a reward model, or the folder or name of one."""


SampledArgs = TypeVar("SampledArgs", bound=SampledFields)


class SampledTrainer(TrainerMethods[SampledArgs]):
    """Trains a model by reward, called as TRL's trainers are; the loop is that of `posttrain.train`.

    What is read otherwise than TRL reads it is printed when the trainer is made, a line each, and kept in `notes`.
    """

    own_rules: ClassVar[Rules]
    """What becomes of each field of its arguments."""
    by_reward = True
    loss_remedy = "Write the loss as a LossTerm in an algorithm for posttrain.train."
    settable = TrainerMethods.settable | {"optimizer", "lr_scheduler"}

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
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "LoraConfig | None" = None,
        **not_here: object,
    ) -> None:
        """`not_here` are arguments of TRL's that only their default is possible of: tools, rollout_func."""
        require_none(not_here)
        source = ModelSource(
            model=model,
            processing_class=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
        )
        if train_dataset is None:
            raise UserError(f"{type(self).__name__}: train_dataset is missing; give rows, each with a `prompt`.")
        super().__init__(source, args or self._default_args(model), self.own_rules, callbacks)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        require_strategies(self.args, measures=eval_dataset is not None)
        self.plan = batch_plan(self.args, self.rules)
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
        own_optimizer(optimizers)
        self.optimizer, self.lr_scheduler = optimizers
        """Of your own, None for AdamW and the schedule of the arguments."""
        self.engine: Engine | None = None
        """An engine of your own, in place of the one in this process."""
        self.session: Session | None = None
        """While train() or evaluate() is going on."""
        self.tell()

    def _default_args(self, model: object) -> SampledArgs:
        """Those of a trainer that is given none."""
        kind = cast(type[SampledArgs], self.config_class)
        return kind(default_folder(model, kind.__name__.removesuffix("Config")))

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end, or to where a callback stops; the folder then is a run of posttrain's like any other."""
        with told_in_fields(self.args, self.rules):
            return self._trained(resume_from_checkpoint)

    def _trained(self, resume_from_checkpoint: str | bool | None) -> TrainOutput:
        """What `train` does."""
        asked = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        resume, from_step = resume_step(asked, self.folder)
        if not resume:
            require_free(self.folder, self.args)
        self.plan = batch_plan(self.args, self.rules)  # a script may have changed the arguments since
        config, length, rows = self.described()
        require_trackers(config.run.report_to, config.tracker)
        self.create_optimizer_and_scheduler(length.updates)
        own = self.objects(rows)
        inputs = inputs_of(config, own)
        if resume:
            inputs = require_same_inputs(Path(config.run.folder), inputs, accept_changes=False)
        watcher = CallbackWatcher(
            self.events,
            length,
            entry_of=partial(
                step_entry,
                logged=logged_by(self.args),
                updates=self.plan.updates_per_step,
                passes=self.plan.epochs_per_step,
            ),
            evaluate=None if self.eval_dataset is None else self.evaluate,
        )
        with open_session(config, own) as self.session:
            make_ready(self.session)
            self._begin(from_step, resume=resume)
            watcher.begin(self.session.learner.optimizer)
            how = Beginning(watchers=[watcher], resume=resume, from_step=from_step)
            self.run = to_the_end(train_session(self.session, inputs, how))
        self.session = None
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, watcher.mean_loss, watcher.ended)

    def objects(self, rows: Sequence[Row]) -> CallerObjects:
        """What a session is given beside its config."""
        return CallerObjects(
            policy=self.policy,
            engine=self.engine,
            rewards=self.rewards,
            rows=rows,
            optimizer=own_optimizer((self.optimizer, self.lr_scheduler)),
        )

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """AdamW as the arguments describe it; a script's own version makes the optimiser of `train`."""
        return new_optimizer((model or self.model).parameters(), self.described()[0].update)

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler | None:
        """None: the schedule of the arguments; a script's own version makes the scheduler of its optimiser."""
        return None

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Have `optimizer` and `lr_scheduler` be those of a script's own methods, if it has some."""
        if overrides(self, "create_optimizer") or (self.optimizer is None and overrides(self, "create_scheduler")):
            self.optimizer = self.create_optimizer() or self.optimizer
        if overrides(self, "create_scheduler"):
            made = self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)
            self.lr_scheduler = made or self.lr_scheduler

    def described(self, rows: list[Row] | None = None) -> tuple[Config, RunLength, list[Row]]:
        """The run in our words, how long it is, and its rows: those of train_dataset unless some are given."""
        args, plan = self.args, self.plan
        if rows is None:
            if self.train_dataset is None:
                raise UserError(f"{type(self).__name__}: train_dataset is missing; give rows, each with a `prompt`.")
            most = plan.num_steps(args.max_steps) * plan.prompts_per_step if args.max_steps > 0 else None
            rows = rows_of_dataset(self.train_dataset, "train_dataset", most=most)
            require_prompts(rows, "train_dataset")
        length = RunLength(
            updates=plan.num_updates(args, len(rows)),
            updates_per_step=plan.updates_per_step,
            updates_per_epoch=plan.updates_per_epoch(len(rows)),
        )
        config = rl_config(args, self.model_options, plan, length)
        return with_room(config, args, self.policy, rows), length, rows

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Sample completions of the evaluation rows at the training temperature, score them, and log what comes out."""
        given = eval_dataset if eval_dataset is not None else self.eval_dataset
        if given is None:
            raise UserError(
                f"{type(self).__name__}.evaluate: there are no rows; give eval_dataset to it or to the trainer."
            )
        if isinstance(given, Mapping):
            parts = {f"{metric_key_prefix}_{name}": rows for name, rows in given.items()}
            entries = [self.evaluate(rows, metric_key_prefix=prefix) for prefix, rows in parts.items()]
            return {name: value for entry in entries for name, value in entry.items()}
        rows = rows_of_dataset(given, "eval_dataset", most=None)
        require_prompts(rows, "eval_dataset")
        session = self.session
        if session is not None:
            return self._evaluated(session, rows, metric_key_prefix)
        with (
            told_in_fields(self.args, self.rules),
            open_session(self.described(rows)[0], self.objects(rows)) as own,
        ):
            own.load_weights()
            return self._evaluated(own, rows, metric_key_prefix)

    def _evaluated(self, session: Session, rows: Sequence[Row], prefix: str) -> dict[str, Any]:
        """An evaluation in a session, told to the callbacks."""
        group_size = self.args.num_generations_eval or self.plan.group_size
        entry = evaluation_entry(session, rows, group_size, logged_by(self.args))
        told = prefixed(entry, prefix)
        self.log(told)
        self.events.tell("on_evaluate", metrics=told)
        return told | {"epoch": self.state.epoch}


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


def require_none(given: Mapping[str, object]) -> None:
    """Refuse what TRL's trainer can do and this one cannot."""
    says = {
        "tools": "completions call no tools here",
        "rollout_func": "completions are sampled by the engine; posttrain.train takes one of yours",
        "environment_factory": "a completion is one turn here; give a reward function",
    }
    for name, value in given.items():
        if name not in says:
            raise UserError(unknown_argument_message(GRPOTrainer, name, GRPO_RULES))
        if value is not None:
            raise UserError(f"GRPOTrainer: {name} = {value!r:.60}: {says[name]}.  Leave it out.")


def own_optimizer(given: tuple[object, object]) -> OwnOptimizer | None:
    """The optimiser and the scheduler that a script has made; None where it leaves both out."""
    optimizer, scheduler = given
    if optimizer is None and scheduler is None:
        return None
    if not isinstance(optimizer, Optimizer) or not isinstance(scheduler, LRScheduler | None):
        raise UserError(
            "optimizers: give (optimizer, scheduler) of torch, or (optimizer, None) for the schedule of"
            " lr_scheduler_type from the rates of the optimiser's groups.  A scheduler is of one optimiser, so it"
            " cannot come alone."
        )
    return OwnOptimizer(optimizer=optimizer, scheduler=scheduler)
