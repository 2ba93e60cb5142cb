"""SFTTrainer: TRL's constructor and methods over `posttrain.train_sft`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput

from posttrain.config import SftConfig
from posttrain.errors import UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example
from posttrain.runs.reports import StepReport
from posttrain.training.sft.learned_rows import GivenRows, RowExamples
from posttrain.training.sft.sft_run import example_source, train_sft
from posttrain.training.sft.supervised import held_out_loss
from posttrain.trl.as_config import (
    RunLength,
    checkpoint_options,
    require_strategies,
    run_options,
    schedule_of,
    tracker_options,
    warmup_updates,
)
from posttrain.trl.callback_watcher import CallbackWatcher
from posttrain.trl.fields.sft_config import SFT_RULES, SFTConfig, rows_of_update
from posttrain.trl.fields.told_in_fields import told_in_fields
from posttrain.trl.fields.training_fields import TrainingFields
from posttrain.trl.log_entries import Entry, prefixed
from posttrain.trl.model_source import ModelSource, default_folder
from posttrain.trl.saved_models import require_free, resume_step
from posttrain.trl.surface.names_elsewhere import unknown_argument_message
from posttrain.trl.surface.token_rows import TokenRows
from posttrain.trl.trainer_methods import TrainerMethods
from posttrain.trl.training_rows import Dataset, Row, rows_of_dataset

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

LOGGED = ("loss", "grad_norm", "learning_rate", "num_tokens", "entropy", "mean_token_accuracy")
"""What an entry of the log has, as TRL logs it."""
NOT_HERE = {
    "data_collator": "rows are made into tokens in one way",
    "compute_loss_func": "the loss is -log π of what is learned",
    "compute_metrics": "the loss on held-out rows is what is measured",
    "optimizers": "AdamW with the schedules of lr_scheduler_type is what there is",
    "optimizer_cls_and_kwargs": "AdamW with the schedules of lr_scheduler_type is what there is",
    "preprocess_logits_for_metrics": "the loss on held-out rows is what is measured",
}
"""Arguments of TRL's trainer of which only the default is possible, with why."""


class SFTTrainer(TrainerMethods[SFTConfig]):
    """Trains a model on rows, told as TRL's class of that name is told; the loop is that of `posttrain.train_sft`."""

    config_class = SFTConfig

    def __init__(
        self,
        model: str | nn.Module,
        args: SFTConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[Any] | None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "LoraConfig | None" = None,
        formatting_func: Callable[[Row], str] | None = None,
        **not_here: object,
    ) -> None:
        """`formatting_func` makes the text of a row.  `not_here` are arguments whose default alone is possible."""
        require_defaults({"data_collator": data_collator, **not_here})
        source = ModelSource(
            model=model,
            processing_class=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
        )
        if train_dataset is None:
            raise UserError("SFTTrainer: train_dataset is missing; give rows.")
        super().__init__(source, args or SFTConfig(default_folder(model, "SFT")), SFT_RULES, callbacks)
        self.given_rows: Dataset | None = train_dataset
        self._shown: TokenRows | None = None
        self.eval_dataset, self.formatting_func = eval_dataset, formatting_func
        require_strategies(self.args, measures=eval_dataset is not None)
        self.tell()

    @property
    def train_dataset(self) -> Dataset | None:
        """The rows as they are learned, with `input_ids` and `labels`; a stream as it was given."""
        given = self.given_rows
        if given is None or not hasattr(given, "__len__"):
            return given
        if self._shown is None:
            whole = self._config(self.learned(given, "train_dataset")).sft.loss_on == "all"
            self._shown = TokenRows(lambda: self._examples(given, "train_dataset"), learned_whole=whole)
        return self._shown

    @train_dataset.setter
    def train_dataset(self, given: Dataset | None) -> None:
        """Other rows to learn."""
        self.given_rows, self._shown = given, None

    def _config(self, rows: Sequence[Row]) -> SftConfig:
        """The run over these rows, in our words."""
        return sft_config(self, rows, run_length(self.args, len(rows)))

    def _examples(self, given: object, name: str) -> list[Example]:
        """Rows made into tokens, in their order."""
        rows = self.learned(given, name)
        source = example_source(self._config(rows), self.policy, GivenRows(rows=rows, held_out=None))
        assert isinstance(source, RowExamples)
        return [each.unpacked() for each in source.trained]

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end, or to where a callback stops; the folder then is a run of posttrain's like any other."""
        with told_in_fields(self.args, SFT_RULES):
            return self._trained(resume_from_checkpoint)

    def _trained(self, resume_from_checkpoint: str | bool | None) -> TrainOutput:
        """What `train` does."""
        asked = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        resume, from_step = resume_step(asked, self.folder)
        if not resume:
            require_free(self.folder, self.args)
        rows = self.learned(self.given_rows, "train_dataset")
        length = run_length(self.args, len(rows))
        measures = self.eval_dataset is not None
        watcher = CallbackWatcher(self.events, length, entry_of=sft_entry, evaluate=self.evaluate if measures else None)
        self._begin(from_step, resume=resume)
        watcher.begin(None)
        self.run = train_sft(
            sft_config(self, rows, length),
            policy=self.policy,
            rows=rows,
            watchers=[watcher],
            resume=resume,
            from_step=from_step,
        )
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, watcher.mean_loss, watcher.ended)

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """The loss on rows that are not trained on, logged."""
        given = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(given, Mapping):
            parts = {f"{metric_key_prefix}_{name}": rows for name, rows in given.items()}
            entries = [self.evaluate(rows, metric_key_prefix=prefix) for prefix, rows in parts.items()]
            return {name: value for entry in entries for name, value in entry.items()}
        config = self._config(self.learned(given, "eval_dataset"))
        examples = self._examples(given, "eval_dataset")
        measured = held_out_loss(self.policy, examples, config.sft.tokens_per_microbatch)
        found: Entry = {
            "loss": measured.loss,
            "entropy": measured.entropy,
            "mean_token_accuracy": measured.accuracy,
        }
        told = prefixed(found, metric_key_prefix)
        self.log(told)
        self.events.tell("on_evaluate", metrics=told)
        return told | {"epoch": self.state.epoch}

    def learned(self, given: object, name: str) -> list[Row]:
        """The rows with their text in the column `text`."""
        if given is None:
            raise UserError(f"SFTTrainer: {name} is missing; give rows.")
        rows = rows_of_dataset(given, name, most=self.rows_to_draw() if name == "train_dataset" else None)
        column, text = self.args.dataset_text_field, self.formatting_func
        if text is not None:
            return [{"text": text(row)} for row in rows]
        if column != "text" and column in rows[0]:
            return [{"text": row[column]} for row in rows]
        return rows

    def rows_to_draw(self) -> int | None:
        """Rows that a run of max_steps learns; None where epochs say how long it is."""
        args = self.args
        return args.max_steps * rows_of_update(args) if args.max_steps > 0 else None


NO_LIMIT = 1_000_000_000
"""Tokens of a batch that rows alone limit."""


def run_length(args: TrainingFields, num_rows: int) -> RunLength:
    """How long a run is, in updates as TRL counts them."""
    batches = math.ceil(num_rows / args.per_device_train_batch_size)
    of_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    updates = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * of_epoch)
    return RunLength(updates=updates, updates_per_step=1, updates_per_epoch=of_epoch)


def sft_config(trainer: SFTTrainer, rows: Sequence[Row], length: RunLength) -> SftConfig:
    """The run that the arguments describe, in our words."""
    args, longest = trainer.args, trainer.policy.max_positions
    asked = args.max_seq_length or args.max_length
    limit = min(asked or longest, longest)
    options = SftOptions(
        learning_rate=args.learning_rate,
        warmup_steps=warmup_updates(args, length.updates),
        schedule=schedule_of(args),
        weight_decay=args.weight_decay,
        decay_adapter=args.weight_decay > 0 and trainer.model_options.adapter is not None,
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        max_grad_norm=args.max_grad_norm or math.inf,
        loss_on=learned_part(args, rows[0]),
        measure_entropy=True,
        max_length=limit,
        long_rows="error" if asked is None else "cut",
        rows_per_batch=rows_of_update(args),
        tokens_per_batch=NO_LIMIT,
        tokens_per_microbatch=max(2, args.per_device_train_batch_size * limit),
    )
    return SftConfig(
        model=trainer.model_options,
        task=DatasetOptions(held_out_share=0.0),
        sft=options,
        checkpoint=checkpoint_options(args, length),
        tracker=tracker_options(args),
        run=run_options(args, length.steps),
    )


def learned_part(args: SFTConfig, row: Row) -> Literal["assistant", "all"]:
    """What of a row is learned: TRL learns completions without their prompts, and messages and text whole."""
    if "completion" in row:
        return "all" if args.completion_only_loss is False else "assistant"
    return "assistant" if args.assistant_only_loss else "all"


def sft_entry(report: StepReport) -> Entry:
    """What a step logs."""
    return {name: report.metrics[name] for name in LOGGED}


def require_defaults(given: Mapping[str, object]) -> None:
    """Refuse what TRL's trainer can do and this one cannot."""
    for name, value in given.items():
        if name not in NOT_HERE:
            raise UserError(unknown_argument_message(SFTTrainer, name, SFT_RULES))
        if value is not None and value != (None, None):
            raise UserError(f"SFTTrainer: {name} = {value!r:.60}: {NOT_HERE[name]}.  Leave it out.")
