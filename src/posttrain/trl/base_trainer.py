"""The parts that all trainers share: policy, rows, callbacks, train() and evaluate().

Each kind of trainer defines what it trains and measures.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from posttrain.errors import UserError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_layers import peft_layers
from posttrain.models.loading.saving import save_trained
from posttrain.options.dataset import DatasetOptions
from posttrain.options.training import OptimizerOptions
from posttrain.runs.checkpoint import load_checkpoint
from posttrain.runs.reports import Run, StepReport
from posttrain.runs.tensor_state import restore_module
from posttrain.schemas import did_you_mean
from posttrain.training.optimizer import OwnOptimizer, new_optimizer
from posttrain.trl import model_source, saved_models
from posttrain.trl.callback_watcher import CallbackWatcher, Events, RunRates, Schedule, made_callback
from posttrain.trl.configs import recipe
from posttrain.trl.configs.field_rules import config_from, errors_by_field, lines_about, require_values
from posttrain.trl.configs.recipe import RunLength, run_length
from posttrain.trl.configs.training_fields import OneProcess, TrainingFields
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import Dataset, Given, Row, rows_of_dataset
from posttrain.trl.names_elsewhere import overrides, require_called

Args = TypeVar("Args", bound=TrainingFields)


class BaseTrainer(saved_models.ModelWriter, Generic[Args]):
    """A model, rows and callbacks.  Each kind of trainer defines `recipe`, `_fit` and `_measured`.

    `notes` lists the differences to TRL.
    """

    settable = frozenset({"train_dataset", "eval_dataset", "optimizer", "lr_scheduler"})
    not_called = frozenset(
        {"accelerator", "is_deepspeed_enabled", "is_fsdp_enabled", "is_model_parallel"}
        | {"create_model_card", "get_eval_dataloader", "get_train_dataloader", "save_metrics", "save_state"}
    )
    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    config_class: ClassVar[type[TrainingFields]]
    wanted: ClassVar[str] = "give rows"
    logged: ClassVar[Sequence[str]] = ("loss", "grad_norm", "learning_rate", "num_tokens")
    """Our metrics that a step logs under TRL's names."""
    only_default: ClassVar[Mapping[str, str]] = {
        "data_collator": "rows are made into tokens in one way",
        "compute_metrics": "an evaluation has TRL's metrics",
        "preprocess_logits_for_metrics": "an evaluation has TRL's metrics",
        "optimizer_cls_and_kwargs": "give the optimiser itself in `optimizers`",
    }
    """Arguments of TRL's trainer that only accept their default, with the reason."""

    def __init__(self, args: Args | None, given: Given) -> None:
        """Without `args`, the defaults are used, with a folder named after the model."""
        if given.train_dataset is None:
            raise UserError(f"{type(self).__name__}: train_dataset is missing; {self.wanted}.")
        kind = cast(type[Args], self.config_class)
        name = given.model if isinstance(given.model, str) else model_source.named_folder(given.model)
        args = args or kind(f"{Path(name).name or 'model'}-{kind.__name__.removesuffix('Config')}")
        require_called(type(self))  # a class may have been patched since it was made
        args, self.notes = config_from(args, kind)
        self.args: Args = args
        require_values(args)
        self.notes += lines_about(args)
        with errors_by_field(args):
            self.policy, self.loaded_model, self.model_options = model_source.load_source(given, args, self.notes)
        self.processing_class = self.policy.tokenizer
        self.events = Events(
            args=args,
            model=lambda: self.model,
            processing_class=self.policy.tokenizer,
            callbacks=[made_callback(each) for each in given.callbacks or ()],
            log_step=lambda entry, start_time: self.log(entry, start_time),
            save_model=self._save_checkpoint_model,
        )
        self.run: Run | None = None
        self.train_dataset: Dataset | None = given.train_dataset
        self.eval_dataset = given.eval_dataset
        recipe.require_strategies(self.args, measures=self.eval_dataset is not None)
        own_optimizer(given.optimizers)
        self.optimizer: Optimizer | None = given.optimizers[0]
        """The script's optimiser; else None until a run starts, and then the run's AdamW."""
        self.lr_scheduler: Schedule | None = given.optimizers[1]
        """The script's scheduler; else None until a run starts, and then the run's rates."""
        self._of_run: tuple[object, ...] = ()
        self._updates_before = 0
        """Number of updates in earlier calls of train()."""

    def _finish_init(self) -> None:
        for note in self.notes:
            print(f"posttrain.trl: {note}", flush=True)
        self.made = True
        self.events.call("on_init_end")

    @property
    def model(self) -> nn.Module:
        """The model; with an adapter, a PeftModel around the policy, or around a classifier of its layers."""
        return self._shown_model

    @cached_property
    def _shown_model(self) -> nn.Module:
        policy, loaded = self.policy.model, self.loaded_model
        adapted = lora_layers(policy) or (loaded is not policy and peft_layers(policy))
        if not adapted or model_source.is_peft_model(loaded) or find_spec("peft") is None:
            return loaded
        from posttrain.trl.peft_models import with_peft_around

        return with_peft_around(policy, cast(PreTrainedModel, loaded))

    @property
    def model_wrapped(self) -> nn.Module:
        return self.model

    @property
    def control(self) -> TrainerControl:
        return self.events.control

    @property
    def accelerator(self) -> OneProcess:
        """The only process, with the accelerate attributes that scripts read."""
        return OneProcess(self.policy.device)

    @property
    def state(self) -> TrainerState:
        return self.events.state

    def is_world_process_zero(self) -> bool:
        return True

    is_local_process_zero = is_world_process_zero

    def get_num_trainable_parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The rows in device batches, in order, for scripts to read; training draws its own batches."""
        return loader(self.train_dataset, "train_dataset", self.args.per_device_train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The same for the evaluation rows; a name selects one of several datasets."""
        given: Any = self.eval_dataset
        if eval_dataset is not None:
            given = given[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        return loader(given, "eval_dataset", self.args.per_device_eval_batch_size)

    def save_state(self) -> None:
        """Write `state` to trainer_state.json in the folder of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saved_models.write_trainer_state(self.state, self.folder)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print numbers of a part of the data ("train", "eval"), one per line."""
        width = max(map(len, metrics), default=0)
        print(f"posttrain.trl: {split} metrics", flush=True)
        for name in sorted(metrics):
            value = metrics[name]
            print(f"  {name:<{width}} = {value:.4g}" if isinstance(value, float) else f"  {name:<{width}} = {value}")

    def add_callback(self, callback: Any) -> None:
        self.events.callbacks.append(made_callback(callback))

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    def pop_callback(self, callback: Any) -> TrainerCallback:
        callbacks = self.events.callbacks
        found = next((each for each in callbacks if each is callback or type(each) is callback), None)
        if found is None:
            raise UserError(f"remove_callback: {callback!r:.60} is not one of the trainer's callbacks.")
        callbacks.remove(found)
        return found

    def log(self, logs: Entry, start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and call `on_log`.  Training calls a script's override.

        `start_time` is when training began, in seconds since 1970.
        """
        self.events.log(logs)

    @classmethod
    def require_defaults(cls, given: Mapping[str, object]) -> None:
        """Reject arguments that TRL's trainer does not have, and values that this one does not support."""
        for name, value in given.items():
            if name not in cls.only_default:
                known = [each for each in signature(cls).parameters if each not in ("self", "not_here")]
                remedy = "Set it in `args`." if name in cls.config_class.field_rules else did_you_mean(name, known)
                remedy = "It is called `processing_class`." if name == "tokenizer" else remedy
                raise UserError(f"{cls.__name__}: there is no argument {name!r}.  {remedy}")
            if value not in (None, (None, None)):
                raise UserError(f"{cls.__name__}: {name} = {value!r:.60}: {cls.only_default[name]}.  Leave it out.")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end, or until a callback stops; the folder is then an ordinary run folder."""
        with errors_by_field(self.args):
            checkpoint = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
            resume, from_step = saved_models.resume_step(checkpoint, self.folder)
            if not resume and (self.folder / "config.yaml").is_file() and not self.args.overwrite_output_dir:
                remedy = "Use resume_from_checkpoint=True, another folder, or overwrite_output_dir=True, to delete it."
                raise UserError(f"output_dir = {self.folder}: already contains a run.  {remedy}")
            config, length, rows = self.described()
            self.optimizer = None if any(self.optimizer is each for each in self._of_run) else self.optimizer
            self.lr_scheduler = None if any(self.lr_scheduler is each for each in self._of_run) else self.lr_scheduler
            self.create_optimizer_and_scheduler(length.updates)
            watcher = CallbackWatcher(
                events=self.events,
                length=length,
                entry_of=self._entry,
                evaluate=None if self.eval_dataset is None else self.evaluate,
                take_best=self.take_best,
                take_optimizer=self._take_optimizer,
            )
            self._updates_before = self.state.global_step
            for note in lines_about(self.args):  # a script may have changed some since the trainer was made
                if note not in self.notes:
                    print(f"posttrain.trl: {note}", flush=True)
            saved_models.remove_dangling(self.folder)
            self.events.begin(
                saved_models.saved_state(self.folder / "checkpoints", from_step) if resume else TrainerState()
            )
            given = {"policy": self.policy, "rows": rows, "optimizer": self.own_optimizer, "watchers": [watcher]}
            self.run = self._fit(config, resume=resume, from_step=from_step, **given)
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, watcher.mean_loss, watcher.ended)

    def described(self, rows: list[Row] | None = None) -> tuple[Any, RunLength, list[Row]]:
        """The run as our config, its length, and its rows: train_dataset, unless others are given."""
        require_values(self.args)  # a script may have changed some since the trainer was made
        rows = self.train_rows() if rows is None else rows
        length = self.length(len(rows))
        return self.recipe(rows, length), length, rows

    def length(self, num_rows: int) -> RunLength:
        return run_length(self.args, num_rows)

    def recipe(self, rows: list[Row], length: RunLength) -> Any:
        """The run as our config."""
        raise NotImplementedError

    def _fit(self, config: Any, **given: Any) -> Run:
        """Train on `rows`; `given` are arguments of all training functions."""
        raise NotImplementedError

    def _entry(self, report: StepReport) -> Entry:
        return {name: report.metrics[name] for name in self.logged}

    def _measured(self, rows: list[Row]) -> Entry:
        """Metrics of evaluation rows, with names without the prefix."""
        raise NotImplementedError

    def take_best(self, checkpoint: Path, folder: Path) -> None:
        """Load a checkpoint's weights, and write them as the model of the run's folder."""
        restore_module(self.policy.model, load_checkpoint(checkpoint).tensors["policy"])
        save_trained(self.policy, folder, "adapter", "")

    def rows(self, given: Dataset | None, name: str) -> list[Row]:
        if given is None:
            raise UserError(f"{type(self).__name__}: {name} is missing; {self.wanted}.")
        return rows_of_dataset(given, name, most=self.rows_to_draw() if name == "train_dataset" else None)

    def train_rows(self) -> list[Row]:
        return self.rows(self.train_dataset, "train_dataset")

    def rows_to_draw(self) -> int | None:
        """Number of rows that a run of max_steps reads; None if epochs define its length."""
        args = self.args
        return args.max_steps * args.rows_per_update if args.max_steps > 0 else None

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        options = OptimizerOptions(**recipe.adamw_options(self.args, self.model_options, self.described()[1].updates))
        return new_optimizer((model or self.model).parameters(), options)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> lr_scheduler.LRScheduler | None:
        """None, which means the schedule of the arguments; `train` uses a script's override."""
        return None

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `optimizer` and `lr_scheduler` by a script's overrides, if it has any."""
        if overrides(self, "create_optimizer") or (self.optimizer is None and overrides(self, "create_scheduler")):
            self.optimizer = self.create_optimizer() or self.optimizer
        if overrides(self, "create_scheduler"):
            made = self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)
            self.lr_scheduler = made or self.lr_scheduler

    @property
    def own_optimizer(self) -> OwnOptimizer | None:
        return own_optimizer((self.optimizer, self.lr_scheduler))

    def _take_optimizer(self, optimizer: Optimizer) -> None:
        given = self.optimizer, self.lr_scheduler
        self.optimizer, self.lr_scheduler = optimizer, self.lr_scheduler or RunRates(optimizer)
        self.events.optimizer, self.events.lr_scheduler = shown = self.optimizer, self.lr_scheduler
        self._of_run = tuple(each for each in shown if not any(each is one for one in given))

    def sections(self, length: RunLength) -> dict[str, Any]:
        shared = recipe.shared_sections(self.args, self.model_options, length)
        return {**shared, "task": DatasetOptions(held_out_share=0.0)}

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Measure the model on evaluation rows, and log the metrics; with several sets, each under its name.

        `ignore_keys` is accepted but has no effect: model outputs are not gathered.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, Mapping):
            parts = {f"{metric_key_prefix}_{name}": rows for name, rows in given.items()}
            entries = [self.evaluate(rows, metric_key_prefix=prefix) for prefix, rows in parts.items()]
            return {name: value for entry in entries for name, value in entry.items()}
        rows = self.rows(given, "eval_dataset")
        began = time.monotonic()
        with errors_by_field(self.args):
            entry = self._measured(rows)
        seconds = time.monotonic() - began
        entry |= {
            "runtime": seconds,
            "samples_per_second": len(rows) / seconds,
            "steps_per_second": math.ceil(len(rows) / self.args.per_device_eval_batch_size) / seconds,
            "num_tokens": float(self.state.num_input_tokens_seen),
        }
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in entry.items()}
        self.log(metrics)
        self.events.call("on_evaluate", metrics=metrics)
        return metrics | {"epoch": self.state.epoch}


def own_optimizer(given: tuple[object, object]) -> OwnOptimizer | None:
    """The optimiser and the scheduler given by a script; None if both are left out."""
    optimizer, scheduler = given
    if optimizer is None and scheduler is None:
        return None
    if not isinstance(optimizer, Optimizer) or not isinstance(scheduler, lr_scheduler.LRScheduler | None):
        raise UserError(
            "optimizers: give torch's (optimizer, scheduler), or (optimizer, None) for lr_scheduler_type with the"
            " rates of the optimiser's groups.  A scheduler needs its optimiser."
        )
    return OwnOptimizer(optimizer=optimizer, scheduler=scheduler)


def loader(given: object, name: str, size: int) -> DataLoader[Any]:
    return DataLoader(cast(Any, rows_of_dataset(given, name, most=size)), batch_size=size, collate_fn=list)
