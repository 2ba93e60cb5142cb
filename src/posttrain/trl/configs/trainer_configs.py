"""The configs of the trainers: the fields of TRL 1.16's, with its names and defaults."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from posttrain.errors import UserError
from posttrain.trl.configs.field_rules import Numbers, above, any_of, idle, ints, old_name, refused, sets
from posttrain.trl.configs.training_fields import BATCHES, BOUND, LIGER, JsonMapping, TextOrFlag, TrainingFields

CUT, UNCUT = "rollout.allow_cut_sampling", "the update scores under the full distribution"
NO_VLLM = idle("it is for vLLM, and completions are sampled in this process.")
SHARED = idle("sampler and trainer share their weights, so that nothing is to be corrected.")
NOT_SOFT = idle("it is for losses that are not here (sapo, vespo).")
NO_ENTROPY = "no entropy acts on the loss here; leave it out.  `entropy` is measured."
IDLE_ENTROPY = idle(NO_ENTROPY)
KEPT = idle("every completion of every step is in rollouts/ of the run's folder, with scores and advantages.")
FREE_FORMAT = refused("completions are sampled freely; reward their format instead.")
CONTINUOUS = idle("sampling always batches continuously: rows that end leave at once.")
AGGREGATIONS = any_of("sum_then_normalize", "normalize_then_sum")
SUMMED = sets("algorithm.reward_aggregation", "normalize_then_sum ignores scale_rewards, as in TRL")
SCALES = sets("algorithm.deviation, algorithm.deviation_over", "with 1e-4 added")
GRPO_LOSSES = any_of("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo")
MASKED = "no loss on a completion that is cut off; its reward counts in its group"


@dataclass
class SampledFields(TrainingFields):
    """The fields that GRPOConfig and RLOOConfig share: sampling, batches, reference."""

    disable_dropout: Annotated[bool, idle("the model's dropout is always off; an adapter's acts in updates.")] = False
    num_generations: Annotated[int | None, ints(2, required=True), sets("rollout.group_size")] = 8
    num_generations_eval: Annotated[int | None, ints(0), sets("", "0 and None are num_generations")] = None
    max_completion_length: Annotated[int | None, ints(1, required=True), sets("rollout.max_completion_tokens")] = 512
    ds3_gather_for_generation: Annotated[bool, idle("one process trains here, and holds all weights.")] = True
    shuffle_dataset: Annotated[bool | None, sets("task.shuffle", "in an order by the seed, which is not TRL's")] = True
    pad_to_multiple_of: Annotated[int | str | None, idle("rows are not padded.")] = "auto"
    generation_batch_size: Annotated[int | None, ints(1), BATCHES] = None
    steps_per_generation: Annotated[
        int | None, ints(1), sets("rollout.prompts_per_step, update.minibatches_per_epoch", BATCHES.says)
    ] = None
    temperature: Annotated[float, above(0), sets("rollout.temperature")] = 1.0
    top_p: Annotated[float | None, Numbers(0, 1, above=True), sets("rollout.top_p, " + CUT, UNCUT)] = 1.0
    top_k: Annotated[int | None, ints(-1), sets("rollout.top_k, " + CUT, f"0 and -1: off; {UNCUT}")] = 0
    min_p: Annotated[float | None, Numbers(0, 1), sets("rollout.min_p, " + CUT, UNCUT)] = None
    generation_kwargs: Annotated[JsonMapping, refused("use temperature, top_p, top_k and min_p.", {})] = None
    chat_template_kwargs: Annotated[JsonMapping, sets("model.template_options")] = None
    repetition_penalty: Annotated[float, refused("log-probs would not be the sampler's; leave it out.")] = 1.0
    cache_implementation: Annotated[str | None, idle("sampling has another cache.")] = None
    use_vllm: Annotated[bool, idle("completions are sampled in this process, from the trained weights.")] = False
    vllm_mode: Annotated[str, NO_VLLM] = "colocate"
    vllm_model_impl: Annotated[str, NO_VLLM] = "vllm"
    vllm_enable_sleep_mode: Annotated[bool, NO_VLLM] = False
    vllm_structured_outputs_regex: Annotated[str | None, FREE_FORMAT] = None
    vllm_server_base_url: Annotated[str | None, NO_VLLM] = None
    vllm_server_host: Annotated[str, NO_VLLM] = "0.0.0.0"
    vllm_server_port: Annotated[int, NO_VLLM] = 8000
    vllm_server_timeout: Annotated[float, NO_VLLM] = 240.0
    vllm_group_port: Annotated[int, NO_VLLM] = 51216
    vllm_gpu_memory_utilization: Annotated[float, NO_VLLM] = 0.3
    vllm_max_model_length: Annotated[int | None, NO_VLLM] = None
    vllm_tensor_parallel_size: Annotated[int, NO_VLLM] = 1
    beta: Annotated[float, Numbers(0), sets("algorithm.kl.coefficient", "k3 in the loss; 0: no reference")] = 0.0
    num_iterations: Annotated[int, ints(1), sets("update.epochs_per_step")] = 1
    epsilon: Annotated[float, Numbers(0, 1), sets("algorithm.clip_low")] = 0.2
    epsilon_high: Annotated[float | None, BOUND, sets("algorithm.clip_high", "epsilon by default")] = None
    reward_weights: Annotated[list[float] | None, Numbers(), sets("", "the weight of each reward function")] = None
    mask_truncated_completions: Annotated[bool, sets("algorithm.mask_truncated", MASKED)] = False
    sync_ref_model: Annotated[bool, sets("reference.refresh_every", "with ref_model_mixup_alpha=1.0")] = False
    ref_model_mixup_alpha: Annotated[float, Numbers(0, 1), sets("reference.refresh_every", "only 1.0: a copy")] = 0.6
    ref_model_sync_steps: Annotated[int, ints(1), sets("reference.refresh_every", "in updates")] = 512
    log_completions: Annotated[bool, KEPT] = False
    log_multimodal: Annotated[bool, idle("there are no images.")] = True
    num_completions_to_print: Annotated[int | None, KEPT] = None
    log_unique_prompts: Annotated[bool, KEPT] = False
    use_transformers_continuous_batching: Annotated[bool, CONTINUOUS] = False
    transformers_continuous_batching_config: Annotated[JsonMapping, CONTINUOUS] = None
    use_transformers_paged: Annotated[bool, CONTINUOUS] = False
    # Names that these classes had once, and scripts still use.
    max_prompt_length: Annotated[
        int | None, ints(1), old_name("task.max_prompt_tokens, task.over_long", "cuts longer prompts from the left.")
    ] = None
    num_sample_generations: Annotated[int | None, KEPT] = None
    wandb_log_unique_prompts: Annotated[bool, KEPT] = False
    vllm_device: Annotated[str | None, NO_VLLM] = None
    vllm_dtype: Annotated[str | None, NO_VLLM] = None
    vllm_max_model_len: Annotated[int | None, NO_VLLM] = None
    vllm_enable_prefix_caching: Annotated[bool, NO_VLLM] = False
    vllm_guided_decoding_regex: Annotated[str | None, FREE_FORMAT] = None
    # A field that Unsloth adds.
    vllm_sampling_params: Annotated[
        object | None, refused("set temperature, top_p, top_k, min_p and max_completion_length instead.")
    ] = None


@dataclass
class GRPOConfig(SampledFields):
    """How GRPOTrainer trains; the page "TRL's fields" says what each field does here."""

    cast_lm_head_to_fp32: Annotated[bool, idle("log-probs are computed in float32.")] = False
    delta: Annotated[
        float | None, Numbers(1, infinite=True), sets("algorithm.dual_clip", "1 + epsilon_high or more; not with cispo")
    ] = None
    sapo_temperature_neg: Annotated[float, NOT_SOFT] = 1.05
    sapo_temperature_pos: Annotated[float, NOT_SOFT] = 1.0
    vespo_k_pos: Annotated[float, NOT_SOFT] = 2.0
    vespo_lambda_pos: Annotated[float, NOT_SOFT] = 3.0
    vespo_k_neg: Annotated[float, NOT_SOFT] = 3.0
    vespo_lambda_neg: Annotated[float, NOT_SOFT] = 2.0
    importance_sampling_level: Annotated[str, any_of("token", "sequence"), sets("algorithm.ratio_level")] = "token"
    multi_objective_aggregation: Annotated[str, AGGREGATIONS, SUMMED] = "sum_then_normalize"
    scale_rewards: Annotated[TextOrFlag, any_of("group", "batch", "none", flags=True), SCALES] = "group"
    loss_type: Annotated[str, GRPO_LOSSES, sets("algorithm.name, algorithm.token_weights")] = "dapo"
    top_entropy_quantile: Annotated[float, refused("every token counts; leave it out.")] = 1.0
    entropy_coef: Annotated[float, refused(NO_ENTROPY)] = 0.0
    use_adaptive_entropy: Annotated[bool, refused(NO_ENTROPY)] = False
    entropy_coef_min: Annotated[float, IDLE_ENTROPY] = 0.0
    entropy_coef_max: Annotated[float, IDLE_ENTROPY] = 1.0
    entropy_coef_delta: Annotated[float, IDLE_ENTROPY] = 0.005
    entropy_target: Annotated[float, IDLE_ENTROPY] = 0.2
    max_tool_calling_iterations: Annotated[
        int | None, ints(0), sets("rollout.max_turns", "one more: the turn behind the last call")
    ] = None
    vllm_importance_sampling_correction: Annotated[bool, SHARED] = True
    vllm_importance_sampling_mode: Annotated[str, SHARED] = "sequence_mask"
    vllm_importance_sampling_clip_max: Annotated[float | None, SHARED] = 3.0
    vllm_importance_sampling_clip_min: Annotated[float | None, SHARED] = None
    off_policy_mask_threshold: Annotated[float | None, refused("use num_iterations=1 to stay on policy.")] = None
    use_bias_correction_kl: Annotated[bool, sets("algorithm.kl.importance", "the KL times the ratio")] = True
    log_completions_hub_repo: Annotated[str | None, refused(KEPT.says + "  Push that folder yourself.")] = None
    vllm_importance_sampling_cap: Annotated[float | None, SHARED] = None
    # A name that this class had once, and scripts still use.
    use_liger_loss: Annotated[bool, LIGER] = False


@dataclass
class RLOOConfig(SampledFields):
    """How RLOOTrainer trains; the page "TRL's fields" says what each field does here."""

    num_generations: int | None = 2
    beta: Annotated[
        float, Numbers(0), sets("algorithm.kl.coefficient", "k1, subtracted from rewards; 0: no reference")
    ] = 0.05
    mask_truncated_completions: Annotated[
        bool, sets("algorithm.mask_truncated", MASKED.replace("loss", "loss and no KL", 1))
    ] = False
    normalize_advantages: Annotated[bool, sets("algorithm.normalize_advantages", "1e-4 added to the deviation")] = False
    reward_clip_range: Annotated[
        tuple[float, float] | None, Numbers(), sets("algorithm.reward_range", "of the sum, before the KL")
    ] = None


OTHER_METRICS = refused("an evaluation has the loss and what else TRL logs; add your own in a callback's on_evaluate.")
NOT_PADDED = idle("{rows} are not padded.")
NOT_PACKED = "rows are not joined, and padding costs nothing here."
PACKING = idle(NOT_PACKED)
TEMPLATE = sets("model.chat_template", "a .jinja file, or a tokenizer whose template is taken; no tokens are added")
EOS_TOKEN = sets("", "a token that the tokenizer has; it ends texts, also those of the saved model")
DPO_LOSSES = "sigmoid, hinge, ipo, robust and sigmoid_norm, with or without sft"
NOT_SYNCED = "the reference stays as it was when training began; leave it out."
CUT_ANSWERS = "cuts the ends of longer answers"
CUT_ENDS = "use max_length, which counts the prompt and cuts the ends of answers."


@dataclass
class RowFields(TrainingFields):
    """The fields of all three: an update learns a number of rows, or of pairs."""

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
    """How SFTTrainer trains; the page "TRL's fields" says what each field does here."""

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
    """The fields that DPOConfig and RewardConfig share."""

    row_kind: ClassVar[str] = "pairs"

    disable_dropout: Annotated[
        bool, refused("the model's dropout is always off, an adapter's acts in updates; leave it out.")
    ] = True


@dataclass
class DPOConfig(PairFields):
    """How DPOTrainer trains; the page "TRL's fields" says what each field does here."""

    recipe_section: ClassVar[str] = "dpo"

    max_length: Annotated[int | None, ints(3), sets(".max_length, .long_pairs", CUT_ANSWERS)] = 1024
    truncation_mode: Annotated[str, refused("longer answers lose their ends; use keep_start.")] = "keep_start"
    padding_free: Annotated[bool, NOT_PADDED] = False
    precompute_ref_log_probs: Annotated[bool, sets("dpo.reference", "when training begins")] = False
    precompute_ref_batch_size: Annotated[int | None, idle("batches have as many tokens as in training.")] = None
    loss_type: Annotated[list[str], sets("dpo.loss, dpo.length_normalized, dpo.nll_weight", DPO_LOSSES)] = field(
        default_factory=lambda: ["sigmoid"]
    )
    loss_weights: Annotated[list[float] | None, Numbers(0), sets("dpo.nll_weight", "of sft; the other is 1")] = None
    ld_alpha: Annotated[float | None, refused("all tokens of an answer count alike; leave it out.", 1.0, 1)] = None
    f_divergence_type: Annotated[str, refused("the divergence is reverse_kl.  Leave it out.")] = "reverse_kl"
    f_alpha_divergence_coef: Annotated[float, idle("the divergence is reverse_kl.")] = 0.5
    label_smoothing: Annotated[
        float, Numbers(0, 0.5, below=True), sets("dpo.label_smoothing", "only with loss_type=robust, as in TRL 1.16")
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
    """How RewardTrainer trains; the page "TRL's fields" says what each field does here."""

    recipe_section: ClassVar[str] = "reward_model"

    learning_rate: float = 1e-4
    chat_template_path: Annotated[str | None, TEMPLATE] = None
    eos_token: Annotated[str | None, EOS_TOKEN] = None
    max_length: Annotated[int | None, ints(3), sets(".max_length, .long_pairs", "skips longer pairs")] = 1024
    center_rewards_coefficient: Annotated[
        float | None, Numbers(0), sets("reward_model.center_coefficient", "None is 0")
    ] = None
