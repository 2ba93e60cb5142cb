"""What becomes of the fields that DPOConfig and RewardConfig share."""

from posttrain.trl.fields.field_rules import Rule, idle, refused, supported
from posttrain.trl.fields.number_rules import whole
from posttrain.trl.fields.sft_config import SFT_RULES
from posttrain.trl.fields.training_rules import TRAINING_RULES, optimizer_rules

LENGTHS = whole(3, or_none=True)
OWN_METRICS = "an evaluation has the loss and TRL's metrics of pairs; add your own in a callback's on_evaluate."


def pair_rules(section: str) -> dict[str, Rule]:
    """The rules of the training fields for pairs, whose options are those of this section."""
    return {
        **TRAINING_RULES,
        **optimizer_rules(section),
        "per_device_train_batch_size": supported(
            f"{section}.pairs_per_batch, {section}.tokens_per_microbatch", "counts pairs", numbers=whole(1)
        ),
        "gradient_accumulation_steps": supported(
            f"{section}.pairs_per_batch", "times the pairs on a device", numbers=whole(1)
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
