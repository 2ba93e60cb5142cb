"""GRPOConfig: the fields of TRL 1.16's, with its names, order and defaults, and what becomes of each."""

from dataclasses import dataclass
from typing import Any, Literal

from posttrain.trl.fields.field_rules import Rules, idle, refused, supported, translated
from posttrain.trl.fields.number_rules import Numbers, above, at_least, between, whole
from posttrain.trl.fields.training_fields import TrainingFields
from posttrain.trl.fields.training_rules import LIGER, TRAINING_RULES


@dataclass
class SampledFields(TrainingFields):
    """What GRPOConfig and RLOOConfig share: how completions are sampled, in which batches, beside which reference."""

    disable_dropout: bool = False
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False
    # Names that these classes had once, and scripts still use.
    max_prompt_length: int | None = None
    num_sample_generations: int | None = None
    wandb_log_unique_prompts: bool = False
    vllm_device: str | None = None
    vllm_dtype: str | None = None
    vllm_max_model_len: int | None = None
    vllm_enable_prefix_caching: bool = False
    vllm_guided_decoding_regex: str | None = None
    # A field that Unsloth adds.
    vllm_sampling_params: object | None = None


@dataclass
class GRPOConfig(SampledFields):
    """How GRPOTrainer trains; the page "TRL's fields" says what becomes of each."""

    cast_lm_head_to_fp32: bool = False
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str | None | Literal[True, False] = "group"  # noqa: RUF036  # in the order that HfArgumentParser reads
    loss_type: str = "dapo"
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions_hub_repo: str | None = None
    vllm_importance_sampling_cap: float | None = None
    # A name that this class had once, and scripts still use.
    use_liger_loss: bool = False


UNCUT = "the update scores under the full distribution"
NO_VLLM = "it is for vLLM, and completions are sampled in this process."
SHARED = "sampler and trainer share their weights, so that nothing is to be corrected."
NOT_SOFT = "it is of losses that are not here (sapo, vespo)."
NO_ENTROPY = "no entropy acts on the loss here; leave it out.  `entropy` is measured."
KEPT = "every completion of every step is in rollouts/ of the run's folder, with scores and advantages."

DELTA, EPSILON_HIGH = at_least(1, or_none=True, infinite=True), at_least(0, or_none=True, infinite=True)

GRPO_RULES: Rules = {
    **TRAINING_RULES,
    "disable_dropout": idle("the model's own dropout is always off; that of an adapter acts in updates."),
    "cast_lm_head_to_fp32": idle("log-probs are computed in float32."),
    "num_generations": supported("rollout.group_size", numbers=whole(2)),
    "num_generations_eval": supported(
        "",
        "completions of each prompt of an evaluation; 0 and None, the default, are num_generations",
        numbers=whole(0, or_none=True),
    ),
    "max_completion_length": supported("rollout.max_completion_tokens", numbers=whole(1)),
    "ds3_gather_for_generation": idle("one process trains here, and holds all weights."),
    "shuffle_dataset": supported("task.shuffle", "the order is a function of the seed, and another one than TRL's"),
    "pad_to_multiple_of": idle("rows are not padded."),
    "generation_batch_size": supported(
        "rollout.prompts_per_step", "see the table of batches", numbers=whole(1, or_none=True)
    ),
    "steps_per_generation": supported(
        "rollout.prompts_per_step, update.minibatches_per_epoch",
        "see the table of batches",
        numbers=whole(1, or_none=True),
    ),
    "temperature": supported("rollout.temperature", numbers=above(0)),
    "top_p": supported(
        "rollout.top_p, rollout.allow_cut_sampling", UNCUT, numbers=between(0, 1, above=True, or_none=True)
    ),
    "top_k": supported(
        "rollout.top_k, rollout.allow_cut_sampling", f"0 and -1: off; {UNCUT}", numbers=whole(-1, or_none=True)
    ),
    "min_p": supported("rollout.min_p, rollout.allow_cut_sampling", UNCUT, numbers=between(0, 1, or_none=True)),
    "generation_kwargs": refused("sampling is temperature, top_p, top_k and min_p; use those.", {}),
    "chat_template_kwargs": supported("model.template_options"),
    "repetition_penalty": refused("ratios would compare another distribution than the one that sampled; leave it out."),
    "cache_implementation": idle("sampling has a cache of its own."),
    "use_vllm": idle("completions are sampled in this process, by an engine that shares the weights."),
    "vllm_mode": idle(NO_VLLM),
    "vllm_model_impl": idle(NO_VLLM),
    "vllm_enable_sleep_mode": idle(NO_VLLM),
    "vllm_structured_outputs_regex": refused("completions are sampled freely; reward their format instead."),
    "vllm_server_base_url": idle(NO_VLLM),
    "vllm_server_host": idle(NO_VLLM),
    "vllm_server_port": idle(NO_VLLM),
    "vllm_server_timeout": idle(NO_VLLM),
    "vllm_group_port": idle(NO_VLLM),
    "vllm_gpu_memory_utilization": idle(NO_VLLM),
    "vllm_max_model_length": idle(NO_VLLM),
    "vllm_tensor_parallel_size": idle(NO_VLLM),
    "beta": supported("algorithm.kl.coefficient", "k3 in the loss; 0 keeps no reference", numbers=at_least(0)),
    "num_iterations": supported("update.epochs_per_step", numbers=whole(1)),
    "epsilon": supported("algorithm.clip_low", numbers=between(0, 1)),
    "delta": supported(
        "algorithm.dual_clip", "1 + epsilon_high or more; an error with cispo, which has no such bound", numbers=DELTA
    ),
    "epsilon_high": supported("algorithm.clip_high", "epsilon by default", numbers=EPSILON_HIGH),
    "sapo_temperature_neg": idle(NOT_SOFT),
    "sapo_temperature_pos": idle(NOT_SOFT),
    "vespo_k_pos": idle(NOT_SOFT),
    "vespo_lambda_pos": idle(NOT_SOFT),
    "vespo_k_neg": idle(NOT_SOFT),
    "vespo_lambda_neg": idle(NOT_SOFT),
    "importance_sampling_level": supported("algorithm.ratio_level", "token and sequence"),
    "reward_weights": supported("", "the weight of each reward function", numbers=Numbers(or_none=True)),
    "multi_objective_aggregation": supported(
        "algorithm.reward_aggregation", "normalize_then_sum heeds no scale_rewards, as in TRL"
    ),
    "scale_rewards": supported(
        "algorithm.deviation, algorithm.deviation_over", "group, batch and none, with 1e-4 added"
    ),
    "loss_type": supported("algorithm.name, algorithm.token_weights", "dapo, grpo, bnpo, dr_grpo, luspo and cispo"),
    "mask_truncated_completions": supported(
        "algorithm.mask_truncated", "no loss on a completion that is cut off; its reward counts in its group"
    ),
    "sync_ref_model": supported("reference.refresh_every", "with ref_model_mixup_alpha=1.0"),
    "ref_model_mixup_alpha": supported(
        "reference.refresh_every", "only 1.0: the reference becomes the policy", numbers=between(0, 1)
    ),
    "ref_model_sync_steps": supported("reference.refresh_every", "in updates", numbers=whole(1)),
    "top_entropy_quantile": refused("every token counts; leave it out."),
    "entropy_coef": refused(NO_ENTROPY),
    "use_adaptive_entropy": refused(NO_ENTROPY),
    "entropy_coef_min": idle(NO_ENTROPY),
    "entropy_coef_max": idle(NO_ENTROPY),
    "entropy_coef_delta": idle(NO_ENTROPY),
    "entropy_target": idle(NO_ENTROPY),
    "max_tool_calling_iterations": idle("completions call no tools here."),
    "vllm_importance_sampling_correction": idle(SHARED),
    "vllm_importance_sampling_mode": idle(SHARED),
    "vllm_importance_sampling_clip_max": idle(SHARED),
    "vllm_importance_sampling_clip_min": idle(SHARED),
    "off_policy_mask_threshold": refused(
        "no completion is masked for its age; use num_iterations=1 to stay on policy."
    ),
    "use_bias_correction_kl": supported("algorithm.kl.importance", "the KL times the ratio"),
    "log_completions": idle(KEPT),
    "log_multimodal": idle("there are no images."),
    "num_completions_to_print": idle(KEPT),
    "log_unique_prompts": idle(KEPT),
    "log_completions_hub_repo": refused(KEPT + "  Push that folder yourself."),
    "use_transformers_continuous_batching": idle(
        "sampling batches continuously as it is: rows that end leave at once."
    ),
    "transformers_continuous_batching_config": idle("sampling batches continuously as it is."),
    "use_transformers_paged": idle("sampling batches continuously as it is."),
    "vllm_importance_sampling_cap": idle(SHARED),
    "max_prompt_length": translated(
        "task.max_prompt_tokens, task.over_long",
        "cuts longer prompts from the left, as TRL once did.",
        numbers=whole(1, or_none=True),
    ),
    "num_sample_generations": idle(KEPT),
    "use_liger_loss": idle(LIGER),
    "wandb_log_unique_prompts": idle(KEPT),
    "vllm_device": idle(NO_VLLM),
    "vllm_dtype": idle(NO_VLLM),
    "vllm_max_model_len": idle(NO_VLLM),
    "vllm_enable_prefix_caching": idle(NO_VLLM),
    "vllm_guided_decoding_regex": refused("completions are sampled freely; reward their format instead."),
    "vllm_sampling_params": refused(
        "completions are sampled in this process; set temperature, top_p, top_k, min_p and max_completion_length."
    ),
}
