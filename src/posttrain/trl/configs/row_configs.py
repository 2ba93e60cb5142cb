"""SFTConfig, DPOConfig and RewardConfig: the fields of TRL 1.16's, with its names and defaults."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from posttrain.errors import UserError
from posttrain.trl.configs.field_rules import above, at_least, between, idle, ints, old_name, refused, sets
from posttrain.trl.configs.training_fields import LIGER, JsonMapping, TrainingFields

OTHER_METRICS = refused("an evaluation has the loss and what else TRL logs; add your own in a callback's on_evaluate.")
NOT_PADDED = idle("{rows} are not padded.")
NOT_PACKED = "rows are not joined, and padding costs nothing here."
PACKING = idle(NOT_PACKED)
TEMPLATE = sets("model.chat_template", "a .jinja file, or a tokenizer whose template is taken; no tokens are added")
EOS_TOKEN = sets("", "a token that the tokenizer has; it ends texts, also those of the saved model")
NOT_SYNCED = "the reference stays as it was when training began; leave it out."
CUT_ENDS = "use max_length, which counts the prompt and cuts the ends of answers."


@dataclass
class RowFields(TrainingFields):
    """What the three share: an update learns a number of rows, or of pairs."""

    per_device_train_batch_size: Annotated[
        int, ints(1), sets(".{rows}_per_batch, .tokens_per_microbatch", "counts {rows}")
    ] = 8
    gradient_accumulation_steps: Annotated[int, ints(1), sets(".{rows}_per_batch", "times the {rows} on a device")] = 1
    per_device_eval_batch_size: Annotated[int, idle("batches have as many tokens as in training.")] = 8
    include_for_metrics: Annotated[list[str], OTHER_METRICS] = field(default_factory=list)
    batch_eval_metrics: Annotated[bool, OTHER_METRICS] = False
    remove_unused_columns: Annotated[
        bool | None, refused("other columns are not read; leave it out.", True, False, None)
    ] = True
    train_sampling_strategy: Annotated[
        str, refused("{rows} are drawn at random, each once in an epoch; leave it out.")
    ] = "random"
    dataset_num_proc: Annotated[int | None, idle("{rows} are made into tokens in this process.")] = None
    max_length: Annotated[int | None, ints(2), sets(".max_length, .long_rows", "cuts the ends of longer rows")] = 1024
    pad_to_multiple_of: Annotated[int | str | None, NOT_PADDED] = "auto"
    activation_offloading: Annotated[bool, idle("use gradient_checkpointing=True to save memory.")] = False
    pad_token: Annotated[str | None, NOT_PADDED] = None


def update_size(args: RowFields) -> str:
    count = args.rows_per_update
    return f"An update learns {count} {'row' if count == 1 else 'rows'}, however short."


@dataclass
class SFTConfig(RowFields):
    """How SFTTrainer trains; the page "TRL's fields" says what becomes of each."""

    recipe_section: ClassVar[str] = "sft"

    learning_rate: float = 2e-05
    chat_template_path: Annotated[str | None, TEMPLATE] = None
    dataset_text_field: Annotated[str, sets("", "the column of plain text")] = "text"
    dataset_kwargs: Annotated[
        JsonMapping,
        refused(
            "rows are prepared in one way; leave it out.",
            {},
            keys={
                "skip_prepare_dataset": idle("rows with `input_ids` are learned as they are, others made into tokens."),
                "add_special_tokens": idle("a text gets the tokenizer's opening tokens once, and its end."),
                "append_concat_token": idle("rows are not joined.", True),
            },
        ),
    ] = None
    eos_token: Annotated[str | None, EOS_TOKEN] = None
    truncation_mode: Annotated[str, refused("longer rows lose their ends; use keep_start.")] = "keep_start"
    shuffle_dataset: Annotated[bool | None, idle("the order of each epoch depends on the seed.")] = False
    packing: Annotated[bool, idle(NOT_PACKED, detail=update_size)] = False
    packing_strategy: Annotated[str, PACKING] = "bfd"
    padding_free: Annotated[bool, NOT_PADDED] = False
    eval_packing: Annotated[bool | None, PACKING] = None
    completion_only_loss: Annotated[bool | None, sets("sft.loss_on", "of a completion, or with False all")] = None
    assistant_only_loss: Annotated[bool, sets("sft.loss_on", "the assistant's turns, or with False all")] = False
    loss_type: Annotated[str, refused("the loss is -log π of what is learned; use nll.", "chunked_nll")] = "nll"
    # Names that this class had once, and scripts still use.
    max_seq_length: Annotated[int | None, ints(2), old_name(".max_length", "is read as max_length.")] = None
    num_of_sequences: Annotated[int | None, PACKING] = None
    chars_per_token: Annotated[float | None, PACKING] = None
    dataset_batch_size: Annotated[int | None, idle("rows are made into tokens one by one.")] = None
    use_liger: Annotated[bool, LIGER] = False


@dataclass
class PairFields(RowFields):
    """What DPOConfig and RewardConfig share."""

    row_kind: ClassVar[str] = "pairs"

    disable_dropout: Annotated[
        bool, refused("the model's dropout is always off, an adapter's acts in updates; leave it out.")
    ] = True


@dataclass
class DPOConfig(PairFields):
    """How DPOTrainer trains; the page "TRL's fields" says what becomes of each."""

    recipe_section: ClassVar[str] = "dpo"

    max_length: Annotated[int | None, ints(3), sets(".max_length, .long_pairs", "cuts the ends of longer answers")] = (
        1024
    )
    truncation_mode: Annotated[str, refused("longer answers lose their ends; use keep_start.")] = "keep_start"
    padding_free: Annotated[bool, NOT_PADDED] = False
    precompute_ref_log_probs: Annotated[bool, sets("dpo.reference", "when training begins")] = False
    precompute_ref_batch_size: Annotated[int | None, idle("batches have as many tokens as in training.")] = None
    loss_type: Annotated[
        list[str],
        sets(
            "dpo.loss, dpo.length_normalized, dpo.nll_weight",
            "sigmoid, hinge, ipo, robust and sigmoid_norm, with or without sft",
        ),
    ] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: Annotated[list[float] | None, at_least(0), sets("dpo.nll_weight", "of sft; the other is 1")] = None
    ld_alpha: Annotated[float | None, refused("all tokens of an answer count alike; leave it out.", 1.0, 1)] = None
    f_divergence_type: Annotated[str, refused("the divergence is reverse_kl.  Leave it out.")] = "reverse_kl"
    f_alpha_divergence_coef: Annotated[float, idle("the divergence is reverse_kl.")] = 0.5
    label_smoothing: Annotated[
        float, between(0, 0.5, below=True), sets("dpo.label_smoothing", "only with loss_type=robust, as in TRL 1.16")
    ] = 0.0
    beta: Annotated[float, above(0), sets("dpo.beta")] = 0.1
    use_weighting: Annotated[bool, refused("pairs are not weighted by their likelihood (WPO); leave it out.")] = False
    discopop_tau: Annotated[float, idle("the loss discopop is not here.")] = 0.05
    sync_ref_model: Annotated[bool, refused(NOT_SYNCED)] = False
    ref_model_mixup_alpha: Annotated[float, idle(NOT_SYNCED)] = 0.6
    ref_model_sync_steps: Annotated[int, idle(NOT_SYNCED)] = 512
    # Names that this class had once, and scripts still use.
    max_prompt_length: Annotated[int | None, refused(CUT_ENDS)] = None
    max_completion_length: Annotated[int | None, refused(CUT_ENDS)] = None
    generate_during_eval: Annotated[bool, refused("an evaluation samples nothing; leave it out.")] = False
    reference_free: Annotated[bool, refused("there is always a reference; leave it out.")] = False
    rpo_alpha: Annotated[
        float | None, refused('use loss_type=["sigmoid", "sft"] with loss_weights=[1.0, ALPHA], as TRL 1.16 has it.')
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.loss_type
        if isinstance(given, str):
            self.loss_type = [given]
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            numbers, losses = len(self.loss_weights), len(self.loss_type)
            raise UserError(f"DPOConfig: loss_weights: {numbers} for {losses} losses of loss_type.  Give one for each.")


@dataclass
class RewardConfig(PairFields):
    """How RewardTrainer trains; the page "TRL's fields" says what becomes of each."""

    recipe_section: ClassVar[str] = "reward_model"

    learning_rate: float = 1e-4
    chat_template_path: Annotated[str | None, TEMPLATE] = None
    eos_token: Annotated[str | None, EOS_TOKEN] = None
    max_length: Annotated[int | None, ints(3), sets(".max_length, .long_pairs", "skips longer pairs")] = 1024
    center_rewards_coefficient: Annotated[
        float | None, at_least(0), sets("reward_model.center_coefficient", "None is 0")
    ] = None
