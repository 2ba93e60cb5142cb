"""What DPOTrainer and RewardTrainer share: rows of pairs, the length of a run, and how one is begun and measured."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers.trainer_utils import TrainOutput

from posttrain.errors import UserError
from posttrain.models.conversation_masks import Masking
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions
from posttrain.records import Preference
from posttrain.runs.reports import Run, StepReport
from posttrain.schemas import did_you_mean
from posttrain.tasks.preferences.preference_set import GivenPairs, preference_set
from posttrain.trl.as_config import RunLength, require_strategies, schedule_of, warmup_updates
from posttrain.trl.callback_watcher import CallbackWatcher
from posttrain.trl.fields.field_rules import Rules
from posttrain.trl.fields.sft_config import rows_of_update
from posttrain.trl.fields.told_in_fields import told_in_fields
from posttrain.trl.fields.training_fields import TrainingFields
from posttrain.trl.log_entries import Entry, prefixed
from posttrain.trl.model_source import ModelSource
from posttrain.trl.saved_models import require_free, resume_step
from posttrain.trl.sft_trainer import run_length
from posttrain.trl.trainer_methods import TrainerMethods
from posttrain.trl.training_rows import Dataset, Row, rows_of_dataset

PairArgs = TypeVar("PairArgs", bound=TrainingFields)

READ = ("prompt", "chosen", "rejected", "tools", "margin")
"""Columns of a row that are read; TRL reads no weights and no ties."""
MEASURED = "TRL's metrics of pairs are what is measured"
NOT_HERE = {
    "data_collator": "pairs are made into tokens in one way",
    "compute_metrics": MEASURED,
    "preprocess_logits_for_metrics": MEASURED,
    "optimizer_cls_and_kwargs": "give the optimiser itself in `optimizers`",
}
"""Arguments of TRL's trainers of which only the default is possible, with why."""


class PairTrainer(TrainerMethods[PairArgs]):
    """A trainer on pairs; what differs between a policy and a reward model is handed to `_train` and `_evaluate`."""

    def __init__(
        self, source: ModelSource, args: PairArgs, rules: Rules, callbacks: Sequence[object] | None, data: "PairData"
    ) -> None:
        super().__init__(source, args, rules, callbacks)
        self.train_dataset, self.eval_dataset = data
        require_strategies(self.args, measures=self.eval_dataset is not None)

    def _train(
        self,
        resume_from_checkpoint: str | bool | None,
        fit: Callable[..., Run],
        entry_of: Callable[[StepReport], Entry],
        take_best: Callable[[Path, Path], None] | None = None,
    ) -> TrainOutput:
        """Train by `fit(rows, length, watchers=, resume=, from_step=)`, and log what `entry_of` makes of each step.

        `take_best(checkpoint, folder)` is for what is more than a policy.
        """
        with told_in_fields(self.args, self.rules):
            asked = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
            resume, from_step = resume_step(asked, self.folder)
            if not resume:
                require_free(self.folder, self.args)
            rows = self.rows(self.train_dataset, "train_dataset")
            length = run_length(self.args, len(rows))
            measures = self.eval_dataset is not None
            watcher = CallbackWatcher(
                self.events,
                length,
                entry_of=entry_of,
                evaluate=self.evaluate if measures else None,
                take_best=take_best,
            )
            self._begin(from_step, resume=resume)
            watcher.begin(None)
            self.run = fit(rows, length, watchers=[watcher], resume=resume, from_step=from_step)
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, watcher.mean_loss, watcher.ended)

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """The loss and TRL's metrics on pairs that are not trained on, logged."""
        given = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(given, Mapping):
            parts = {f"{metric_key_prefix}_{name}": rows for name, rows in given.items()}
            entries = [self.evaluate(rows, metric_key_prefix=prefix) for prefix, rows in parts.items()]
            return {name: value for entry in entries for name, value in entry.items()}
        began = time.monotonic()
        with told_in_fields(self.args, self.rules):
            entry, count = self._measured(self.rows(given, "eval_dataset"), metric_key_prefix)
        seconds = time.monotonic() - began
        batches = math.ceil(count / self.args.per_device_eval_batch_size)
        speed = {"samples_per_second": count / seconds, "steps_per_second": batches / seconds}
        told = prefixed(
            entry | {"runtime": seconds, **speed, "num_tokens": self._num_tokens},
            metric_key_prefix,
        )
        self.log(told)
        self.events.tell("on_evaluate", metrics=told)
        return told | {"epoch": self.state.epoch}

    _num_tokens = 0.0
    """That `train` has learned so far, prompts counted with each answer, as TRL counts them."""

    def _measured(self, rows: list[Row], prefix: str) -> tuple[Entry, int]:
        """What the model makes of the pairs of some rows, and how many pairs they are."""
        raise NotImplementedError

    def rows(self, given: object, name: str) -> list[Row]:
        """The rows with the columns that are read.  Raises UserError where some would say what is not heeded."""
        owner = type(self).__name__
        if given is None:
            raise UserError(f"{owner}: {name} is missing; give rows with `chosen` and `rejected`.")
        drawn = self.args.max_steps * rows_of_update(self.args) if self.args.max_steps > 0 else None
        rows = rows_of_dataset(given, name, most=drawn if name == "train_dataset" else None)
        for column in ("image", "images", "chat_template_kwargs"):
            if any(row.get(column) for row in rows):
                raise UserError(f"{name}: the column {column!r} is not read here.  Leave it out.")
        return [{column: row[column] for column in READ if row.get(column) is not None} for row in rows]

    def pairs(self, rows: Sequence[Row], options: PairOptions) -> Sequence[Preference]:
        """The pairs of some rows, made into tokens."""
        renderer = TokenizerRenderer(self.policy.tokenizer, template_options=self.model_options.template_options)
        assert options.max_length is not None, "as options_of_pairs has it"
        return preference_set(
            Masking(renderer=renderer, stop_ids=self.policy.stop_ids),
            DatasetOptions(held_out_share=0.0),
            options,
            longest=options.max_length,
            seed=self.args.seed,
            given=GivenPairs(rows=rows),
        ).training

    def pair_options(self, length: RunLength, max_length: int | None) -> dict[str, Any]:
        """The options of pairs that the training fields set."""
        args, longest = self.args, self.policy.max_positions
        limit = min(max_length or longest, longest)
        return {
            "learning_rate": args.learning_rate,
            "warmup_steps": warmup_updates(args, length.updates),
            "schedule": schedule_of(args),
            "weight_decay": args.weight_decay,
            "decay_adapter": args.weight_decay > 0 and self.model_options.adapter is not None,
            "beta1": args.adam_beta1,
            "beta2": args.adam_beta2,
            "max_grad_norm": args.max_grad_norm or math.inf,
            "max_length": limit,
            "num_epochs": None,
            "pairs_per_batch": rows_of_update(args),
            "tokens_per_microbatch": max(3, 2 * args.per_device_train_batch_size * limit),
        }


PairData = tuple[Dataset | None, Dataset | Mapping[str, Dataset] | None]
"""The rows to train on and those to evaluate on."""


def require_defaults(owner: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse what TRL's trainer can do and this one cannot."""
    for name, value in given.items():
        if name not in NOT_HERE:
            raise UserError(f"{owner}: there is no argument {name!r}.  {did_you_mean(name, known)}")
        if value is not None:
            raise UserError(f"{owner}: {name} = {value!r:.60}: {NOT_HERE[name]}.  Leave it out.")
