"""What DPOTrainer and RewardTrainer share: rows of pairs, the length of a run, and how one is begun and measured."""

from collections.abc import Sequence
from typing import Any, TypeVar

from posttrain.errors import UserError
from posttrain.models.conversation_masks import Masking
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions
from posttrain.records import Preference
from posttrain.tasks.preference_set import GivenPairs, preference_set
from posttrain.trl.as_config import RunLength, adamw_options
from posttrain.trl.base_trainer import BaseTrainer
from posttrain.trl.fields.sft_config import rows_of_update
from posttrain.trl.fields.training_fields import TrainingFields
from posttrain.trl.training_rows import Dataset, Row

PairArgs = TypeVar("PairArgs", bound=TrainingFields)

READ = ("prompt", "chosen", "rejected", "tools", "margin")
"""Columns of a row that are read; TRL reads no weights and no ties."""
MEASURED = "the metrics are those that TRL logs of pairs"
NOT_HERE = {
    "data_collator": "pairs are made into tokens in one way",
    "compute_metrics": MEASURED,
    "preprocess_logits_for_metrics": MEASURED,
    "optimizer_cls_and_kwargs": "give the optimiser itself in `optimizers`",
}
"""Arguments of TRL's trainers of which only the default is possible, with why."""


class PairTrainer(BaseTrainer[PairArgs]):
    """A trainer on pairs of answers."""

    wanted = "give rows with `chosen` and `rejected`"
    only_default = NOT_HERE

    def rows(self, given: Dataset | None, name: str) -> list[Row]:
        """The rows with the columns that are read.  Raises UserError where some would say what is not heeded."""
        rows = super().rows(given, name)
        for column in ("image", "images", "chat_template_kwargs"):
            if any(row.get(column) for row in rows):
                raise UserError(f"{name}: the column {column!r} is not read here.  Leave it out.")
        return [{column: row[column] for column in READ if row.get(column) is not None} for row in rows]

    def pairs(self, rows: Sequence[Row], options: PairOptions) -> Sequence[Preference]:
        """The pairs of some rows, made into tokens."""
        renderer = TokenizerRenderer(self.policy.tokenizer, template_options=self.model_options.template_options)
        assert options.max_length is not None, "as options_of_pairs has it"
        return preference_set(
            Masking.of(self.policy, renderer),
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
            **adamw_options(args, self.model_options, length.updates),
            "max_length": limit,
            "num_epochs": None,
            "pairs_per_batch": rows_of_update(args),
            "tokens_per_microbatch": max(3, 2 * args.per_device_train_batch_size * limit),
        }
