"""SFTConfig: the fields of TRL 1.16's, with its names, order and defaults, and what becomes of each."""

from dataclasses import dataclass
from typing import Any

from posttrain.trl.fields.field_rules import Rule, Rules, Treatment, idle, refused, supported, translated
from posttrain.trl.fields.number_rules import whole
from posttrain.trl.fields.training_fields import TrainingFields
from posttrain.trl.fields.training_rules import LIGER, TRAINING_RULES, optimizer_rules


@dataclass
class SFTConfig(TrainingFields):
    """How SFTTrainer trains; the page "TRL's fields" says what becomes of each."""

    learning_rate: float = 2e-05
    remove_unused_columns: bool | None = True
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_kwargs: dict[str, Any] | str | None = None
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    shuffle_dataset: bool | None = False
    packing: bool = False
    packing_strategy: str = "bfd"
    padding_free: bool = False
    pad_to_multiple_of: int | str | None = "auto"
    eval_packing: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str = "nll"
    activation_offloading: bool = False
    pad_token: str | None = None

    # Names that this class had once, and scripts still use.
    max_seq_length: int | None = None
    num_of_sequences: int | None = None
    chars_per_token: float | None = None
    dataset_batch_size: int | None = None
    use_liger: bool = False


NOT_PACKED = "rows are not joined, and padding costs nothing here."


def rows_of_update(args: TrainingFields) -> int:
    """Rows that an update learns."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps


def update_size(args: SFTConfig) -> str:
    """How large an update is, for scripts that count on packed rows."""
    count = rows_of_update(args)
    return f"An update learns {count} {'row' if count == 1 else 'rows'}, however short."


TOKENIZER_RULES: Rules = {
    "chat_template_path": supported(
        "model.chat_template", "a .jinja file, or a tokenizer whose template is taken; no tokens are added"
    ),
    "eos_token": supported("", "a token that the tokenizer has; it ends texts, also those of the saved model"),
}
SFT_RULES: Rules = {
    **TRAINING_RULES,
    **optimizer_rules("sft"),
    "per_device_train_batch_size": supported("sft.rows_per_batch, sft.tokens_per_microbatch", "rows", numbers=whole(1)),
    "gradient_accumulation_steps": supported("sft.rows_per_batch", "times the rows on a device", numbers=whole(1)),
    "include_for_metrics": refused("the loss on held-out rows is what is measured; leave it out."),
    "batch_eval_metrics": refused("the loss on held-out rows is what is measured; leave it out."),
    "remove_unused_columns": refused("columns that are not learned are not read; leave it out.", True, False, None),
    "train_sampling_strategy": refused("rows are drawn at random, each once in an epoch; leave it out."),
    **TOKENIZER_RULES,
    "dataset_text_field": supported("", "the column of plain text"),
    "dataset_kwargs": Rule(
        treatment=Treatment.REFUSED,
        says="rows are prepared in one way; leave it out.",
        honours=({},),
        keys={
            "skip_prepare_dataset": idle("rows with `input_ids` are learned as they are, others are made into tokens."),
            "add_special_tokens": idle("a text gets the tokenizer's opening tokens once, and its end."),
            "append_concat_token": idle("rows are not joined.", True),
        },
    ),
    "dataset_num_proc": idle("rows are made into tokens in this process."),
    "max_length": supported(
        "sft.max_length, sft.long_rows", "longer rows lose their ends", numbers=whole(2, or_none=True)
    ),
    "truncation_mode": refused("rows that are too long lose their ends; use keep_start."),
    "shuffle_dataset": idle("rows come in an order drawn anew for each epoch, a function of the seed."),
    "packing": idle(NOT_PACKED, detail=update_size),
    "packing_strategy": idle(NOT_PACKED),
    "padding_free": idle("no row is padded in the loss; nothing is to be set for it."),
    "pad_to_multiple_of": idle("rows are not padded."),
    "eval_packing": idle(NOT_PACKED),
    "completion_only_loss": supported("sft.loss_on", "of prompt and completion: the completion, or with False all"),
    "assistant_only_loss": supported("sft.loss_on", "of messages: the assistant's turns, or with False all"),
    "loss_type": refused("the loss is -log π of what is learned; use nll.", "chunked_nll"),
    "activation_offloading": idle("activations stay on the device; gradient_checkpointing=True saves memory too."),
    "pad_token": idle("rows are not padded."),
    "max_seq_length": translated("sft.max_length", "is read as max_length.", numbers=whole(2, or_none=True)),
    "num_of_sequences": idle(NOT_PACKED),
    "chars_per_token": idle(NOT_PACKED),
    "dataset_batch_size": idle("rows are made into tokens one by one."),
    "use_liger": idle(LIGER),
}
