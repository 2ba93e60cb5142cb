"""What becomes of the fields that DPOConfig and RewardConfig share."""

from posttrain.trl.fields.field_rules import Rule, idle, refused, supported, translated
from posttrain.trl.fields.number_rules import above, at_least, between, whole
from posttrain.trl.fields.sft_config import SFT_RULES
from posttrain.trl.fields.training_rules import TRAINING_RULES

LENGTHS = whole(3, or_none=True)
OWN_METRICS = "an evaluation has the loss and TRL's metrics of pairs; add your own in a callback's on_evaluate."


def pair_rules(section: str) -> dict[str, Rule]:
    """The rules of the training fields for pairs, whose options are those of this section."""
    return {
        **TRAINING_RULES,
        "per_device_train_batch_size": supported(
            f"{section}.pairs_per_batch, {section}.tokens_per_microbatch", "counts pairs", numbers=whole(1)
        ),
        "gradient_accumulation_steps": supported(
            f"{section}.pairs_per_batch", "times the pairs on a device", numbers=whole(1)
        ),
        "learning_rate": supported(f"{section}.learning_rate", "as it is given, with an adapter too", numbers=above(0)),
        "lr_scheduler_type": supported(f"{section}.schedule", "linear, cosine, constant and constant_with_warmup"),
        "warmup_steps": supported(
            f"{section}.warmup_steps",
            "below 1 a share of all updates; the first rate is lr/w, not 0",
            numbers=at_least(0),
        ),
        "warmup_ratio": translated(
            f"{section}.warmup_steps",
            "is read as warmup_steps, a share of all updates.",
            numbers=between(0, 1, or_none=True),
        ),
        "weight_decay": supported(f"{section}.weight_decay", "on matrices", numbers=at_least(0)),
        "adam_beta1": supported(f"{section}.beta1", numbers=between(0, 1, below=True)),
        "adam_beta2": supported(f"{section}.beta2", numbers=between(0, 1, below=True)),
        "max_grad_norm": supported(
            f"{section}.max_grad_norm", "0 and None clip nothing", numbers=at_least(0, or_none=True, infinite=True)
        ),
        "per_device_eval_batch_size": idle("pairs are measured in batches of as many tokens as in training."),
        "include_for_metrics": refused(OWN_METRICS),
        "batch_eval_metrics": refused(OWN_METRICS),
        "remove_unused_columns": refused("other columns are not read; leave it out.", True, False, None),
        "train_sampling_strategy": refused("pairs are drawn at random, each once in an epoch; leave it out."),
        "disable_dropout": refused(
            "the model's own dropout is always off, so False is not possible; an adapter's dropout acts in updates.",
        ),
        "dataset_num_proc": idle("pairs are made into tokens in this process."),
        "pad_to_multiple_of": idle("rows are not padded."),
        "pad_token": idle("rows are not padded."),
        "activation_offloading": SFT_RULES["activation_offloading"],
    }
