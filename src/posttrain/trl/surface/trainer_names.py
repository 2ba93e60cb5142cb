"""Methods and attributes of the trainers of TRL 1.16.0 over transformers 5.23.0; "Trainer" is for all.

Generated: `python benchmarks/trl/trainer_names.py` writes this file, and `make trl-parity` compares it.
"""

from collections.abc import Mapping

TEXTS = {
    "Trainer": """
    _attn_mask_causal_checked _build_accelerator_args _clip_grad_norm _created_lr_scheduler
    _defer_fsdp_gradient_reduction _determine_best_metric _eval_dataloaders _evaluate _finalize_training
    _finish_current_push _get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_grad_norm
    _get_learning_rate _get_num_items_in_batch _get_output_dir _get_train_sampler _globalstep_last_logged
    _has_mixed_mesh_grads _hp_search_setup _init_training_state _initial_global_step
    _initial_num_input_tokens_seen _inner_training_loop _issue_warnings_after_load _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler
    _loggers_initialized _loss_shifts_labels _maybe_log_save_evaluate _memory_tracker _mixed_mesh_grad_norm
    _mixed_mesh_grads _move_model_to_device _prepare_context_parallel_inputs _prepare_for_training
    _prepare_input _prepare_inputs _push_from_checkpoint _remove_unused_columns _report_to_hp_search _run_epoch
    _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler
    _set_signature_columns_if_needed _signature_columns _sync_replicated_trainable_parameters _total_loss_scalar
    _tr_loss _track_num_input_tokens _train_batch_size _trial _tune_save_checkpoint _update_auto_batch_size
    _validate_args _wrap_model accelerator add_callback args autocast_smart_context_manager call_model_init
    callback_handler can_return_loss compute_loss compute_loss_context_manager compute_loss_func compute_metrics
    compute_objective control create_accelerator_and_postprocess create_model_card create_optimizer
    create_optimizer_and_scheduler create_scheduler current_flos current_gradient_accumulation_steps
    data_collator deepspeed end eval_dataset evaluate evaluation_loop floating_point_ops gather_function
    get_batch_samples get_cp_size get_decay_parameter_names get_eval_dataloader get_learning_rates
    get_num_trainable_parameters get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size
    get_test_dataloader get_total_train_batch_size get_tp_size get_train_dataloader hp_name hp_search_backend
    hp_space hub_model_id hyperparameter_search init_hf_repo is_deepspeed_enabled
    is_distributed_loading_by_transformers is_fsdp_enabled is_fsdp_xla_enabled is_fsdp_xla_v1_enabled
    is_fsdp_xla_v2_enabled is_in_train is_local_process_zero is_model_parallel is_world_process_zero label_names
    label_smoother log log_metrics loss_is_scaled_for_ga lr_scheduler metrics_format model
    model_accepts_loss_kwargs model_init model_preparation_time model_wrapped neftune_hook_handle
    neftune_noise_alpha num_examples objective optimizer optimizer_cls_and_kwargs place_model_on_device
    pop_callback predict prediction_step preprocess_logits_for_metrics processing_class push_in_progress
    push_to_hub remove_callback save_metrics save_model save_state set_initial_training_values state store_flos
    train train_dataset training_step
    """,
    "GRPOTrainer": """
    _async_tool_dicts _batch_environments _buffered_inputs _calculate_rewards _compute_loss
    _current_train_step_time _dist _entropy_bonus_enabled _entropy_window_stats _env_tools _environment_pool
    _generate _generate_and_score_completions _generate_single_turn _get_per_token_logps_and_entropies
    _get_tool_suffix_ids _has_async_funcs _image_pad_token_id _is_vlm _last_loaded_step _last_world_entropy
    _log_completion_extra _log_metric _logs _metrics _multi_environment _name _paper _pending_extra_logs
    _pending_metrics _send_telemetry _standalone_tools _step _sync_tool_dicts _tag_names _template_file
    _tokenize_prompts _tokenizer _tool_call_loop _total_train_tokens _video_pad_token_id async_loop
    async_loop_ready_event async_loop_thread aux_loss_enabled beta chat_template chat_template_kwargs
    commit_scheduler continuous_batching_config entropy_coef environment_factories environments eos_token_ids
    epsilon_high epsilon_low generation_config generation_kwargs get_gamma_weights get_high_entropy_mask
    get_off_policy_mask importance_sampling_level log_completions log_multimodal log_unique_prompts loss_type
    mask_truncated_completions max_completion_length max_tool_calling_iterations min_p
    multi_objective_aggregation num_completions_to_print num_generations num_generations_eval num_iterations
    off_policy_mask_threshold pad_to_multiple_of ref_model repetition_penalty reward_func_names reward_funcs
    reward_processing_classes reward_weights rollout_func router_aux_loss_coef scale_rewards shuffle_dataset
    temperature tools top_entropy_quantile top_k top_p use_adaptive_entropy use_transformers_continuous_batching
    use_vllm vllm_generation vllm_gpu_memory_utilization vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_mode vllm_tensor_parallel_size
    """,
    "SFTTrainer": """
    _formatting_func _is_vision_dataset _is_vlm _metrics _name _paper _prepare_dataset
    _reject_skip_prepare_without_labels _send_telemetry _skip_prepare_dataset _tag_names _template_file
    _tokenizer _total_train_tokens _tp_size aux_loss_enabled chat_template completion_only_loss
    maybe_activation_offload_context padding_free router_aux_loss_coef
    """,
    "DPOTrainer": """
    _compute_loss _is_vision_dataset _is_vlm _metrics _name _paper _precompute_engine _precompute_model_hash
    _precompute_ref_logps _prepare_dataset _send_telemetry _tag_names _template_file _tokenizer
    _total_train_tokens _tp_size aux_loss_enabled beta compute_ref_log_probs f_alpha_divergence_coef
    f_divergence_type label_smoothing ld_alpha loss_types loss_weights maybe_activation_offload_context
    padding_free precompute_ref_logps ref_model router_aux_loss_coef use_weighting
    """,
    "RewardTrainer": """
    _metrics _name _paper _prepare_dataset _send_telemetry _tag_names _template_file _total_train_tokens
    _tp_size maybe_activation_offload_context
    """,
    "RLOOTrainer": """
    _buffered_inputs _calculate_rewards _compute_loss _current_train_step_time _dist _generate
    _generate_and_score_completions _generate_single_turn _get_per_token_logps_and_entropies _has_async_funcs
    _is_vlm _last_loaded_step _log_completion_extra _log_metric _logs _metrics _name _paper _pending_extra_logs
    _pending_metrics _send_telemetry _step _tag_names _template_file _tokenize_prompts _tokenizer
    _total_train_tokens async_loop async_loop_ready_event async_loop_thread aux_loss_enabled beta
    chat_template_kwargs continuous_batching_config eos_token_ids epsilon_high epsilon_low generation_config
    generation_kwargs log_completions log_multimodal log_unique_prompts mask_truncated_completions
    max_completion_length min_p normalize_advantages num_completions_to_print num_generations
    num_generations_eval num_iterations pad_to_multiple_of ref_model repetition_penalty reward_clip_range
    reward_func_names reward_funcs reward_processing_classes reward_weights router_aux_loss_coef shuffle_dataset
    temperature top_k top_p use_transformers_continuous_batching use_vllm vllm_generation
    vllm_gpu_memory_utilization vllm_mode vllm_tensor_parallel_size
    """,
}

NAMES: Mapping[str, frozenset[str]] = {trainer: frozenset(text.split()) for trainer, text in TEXTS.items()}
