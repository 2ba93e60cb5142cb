"""What becomes of each field of `TrainingFields`; the page "TRL's fields" is made of this table."""

from posttrain.trl.fields.field_rules import Rule, Rules, idle, refused, supported, translated
from posttrain.trl.fields.number_rules import above, at_least, between, interval, whole

ONE_PROCESS = "one process trains here, on one device."
NO_DATALOADER = "rows are a list in memory, and prompts are rendered when they are drawn."
OWN_METRICS = "what is measured is the reward; write a reward function of weight 0 for another measure."
EVALUATION = "an evaluation keeps nothing but its metrics."

OTHER_ADAMW = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adamw_apex_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
)
"""AdamW under other names: of the same update they change how it is computed, or how its moments are stored."""
LIGER = "log-probs are computed in chunks here, without that package."


def optimizer_rules(section: str) -> dict[str, Rule]:
    """What becomes of AdamW's fields, whose options are those of a section."""
    return {
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
        "weight_decay": supported(
            f"{section}.weight_decay",
            "on matrices; of an adapter on A and B, towards the base model",
            numbers=at_least(0),
        ),
        "adam_beta1": supported(f"{section}.beta1", numbers=between(0, 1, below=True)),
        "adam_beta2": supported(f"{section}.beta2", numbers=between(0, 1, below=True)),
        "max_grad_norm": supported(
            f"{section}.max_grad_norm", "0 and None clip nothing", numbers=at_least(0, or_none=True, infinite=True)
        ),
    }


TRAINING_RULES: Rules = {
    **optimizer_rules("update"),
    "output_dir": supported("run.folder", "the folder of the run, `trainer_output` by default"),
    "per_device_train_batch_size": supported(
        "rollout.prompts_per_step, update.tokens_per_microbatch", "counts completions, as in TRL", numbers=whole(1)
    ),
    "num_train_epochs": supported("run.num_steps", "in updates, as TRL counts them", numbers=above(0)),
    "max_steps": supported(
        "run.num_steps",
        "in updates; several of a step are taken together; 0 and -1: num_train_epochs",
        numbers=whole(-1),
    ),
    "lr_scheduler_kwargs": refused(
        "the schedules here have no further arguments; give the scheduler in `optimizers`.", {}
    ),
    "optim": refused(
        "AdamW of torch is the optimiser here; give another in `optimizers`.",
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        reads=dict.fromkeys(OTHER_ADAMW, "is read as AdamW of torch, with moments in float32: 8 bytes a weight."),
    ),
    "optim_args": refused("AdamW has no further arguments here; give an optimiser in `optimizers`."),
    "adam_epsilon": refused("AdamW's epsilon is 1e-8 here; give an optimiser in `optimizers`."),
    "optim_target_modules": refused("it is for optimisers that are not here (GaLore); give one in `optimizers`."),
    "gradient_accumulation_steps": supported("rollout.prompts_per_step", "see the table of batches", numbers=whole(1)),
    "average_tokens_across_devices": idle(ONE_PROCESS),
    "label_smoothing_factor": refused("no label is smoothed here; leave it out."),
    "bf16": supported("model.dtype", "on a GPU; on a CPU a line says that float32 is used"),
    "fp16": supported("model.dtype", "as bf16, where the GPU has it: float16 overflows; a line says what is used"),
    "bf16_full_eval": idle("an evaluation computes as training does."),
    "fp16_full_eval": idle("an evaluation computes as training does."),
    "tf32": idle("matrix products keep torch's setting, `torch.set_float32_matmul_precision`."),
    "activation_checkpointing": translated("model.gradient_checkpointing", "is read as gradient_checkpointing."),
    "activation_checkpointing_kwargs": idle("layers are computed again without reentrance."),
    "gradient_checkpointing": supported(
        "model.gradient_checkpointing", "off unless a script says True, TRL's default: it changes memory and no number"
    ),
    "no_gradient_checkpointing": supported("model.gradient_checkpointing", "off, as the flag of TRL's parser says"),
    "gradient_checkpointing_kwargs": idle("layers are computed again without reentrance."),
    "torch_compile": idle("nothing is compiled here."),
    "torch_compile_backend": idle("nothing is compiled here."),
    "torch_compile_mode": idle("nothing is compiled here."),
    "use_liger_kernel": idle(LIGER),
    "liger_kernel_config": idle(LIGER),
    "use_cache": idle("sampling has a key/value cache of its own, training none."),
    "neftune_noise_alpha": refused("no noise is added to embeddings here; leave it out."),
    "torch_empty_cache_steps": idle("memory is given back to the allocator after each micro-batch."),
    "auto_find_batch_size": refused("set per_device_train_batch_size; a smaller one changes no gradient here."),
    "logging_strategy": supported("", "steps, epoch and no: when `state.log_history` gets an entry"),
    "logging_steps": supported(
        "", "in updates, below 1 a share of all; metrics.jsonl has every step anyway", numbers=interval(0, above=True)
    ),
    "logging_first_step": supported("", "an entry after the first step too"),
    "log_on_each_node": idle(ONE_PROCESS),
    "logging_nan_inf_filter": idle("a loss that is not finite ends the run before its update."),
    "include_num_input_tokens_seen": idle("`num_tokens` is always logged.", False),
    "log_level": idle("a run prints its plan and its progress."),
    "log_level_replica": idle(ONE_PROCESS),
    "disable_tqdm": idle("progress is a bar in a terminal and plain lines elsewhere."),
    "report_to": supported("run.report_to", "tensorboard, wandb, mlflow and trackio; none by default"),
    "run_name": supported("tracker.name", "its folder by default"),
    "project": supported("tracker.project", "the package's name by default"),
    "trackio_space_id": refused("runs are tracked on this machine; leave it out."),
    "trackio_bucket_id": refused("runs are tracked on this machine; leave it out."),
    "trackio_static_space_id": refused("runs are tracked on this machine; leave it out."),
    "eval_strategy": supported("", "no, steps and epoch: when there is an evaluation"),
    "eval_steps": supported(
        "", "in updates; 0 and None, the default, are logging_steps", numbers=interval(0, or_none=True)
    ),
    "eval_delay": supported(
        "", "updates, or with eval_strategy=epoch epochs, before the first evaluation", numbers=at_least(0)
    ),
    "per_device_eval_batch_size": idle(
        "rollout.max_rows bounds what is decoded side by side; no number depends on it."
    ),
    "prediction_loss_only": idle(EVALUATION),
    "eval_on_start": supported("", "an evaluation before the first step"),
    "eval_do_concat_batches": idle(EVALUATION),
    "eval_use_gather_object": idle(ONE_PROCESS),
    "eval_accumulation_steps": idle(EVALUATION),
    "include_for_metrics": refused(OWN_METRICS),
    "batch_eval_metrics": refused(OWN_METRICS),
    "save_only_model": idle("a checkpoint holds all that the next step reads; save_total_limit=1 keeps one."),
    "save_strategy": supported(
        "checkpoint.every_steps", "steps, epoch, best (evaluation so far) and no; the last step is always saved"
    ),
    "save_steps": supported(
        "checkpoint.every_steps", "in updates, below 1 a share of all; 0: only the last", numbers=interval(0)
    ),
    "save_on_each_node": idle(ONE_PROCESS),
    "save_total_limit": supported(
        "checkpoint.keep_last",
        "all are kept by default, and for 0 or -1; with metric_for_best_model the best is always one of them",
        numbers=whole(-1, or_none=True),
    ),
    "enable_jit_checkpoint": idle("a signal ends the run after its step, with a checkpoint."),
    "push_to_hub": supported("", "once, after the last step"),
    "hub_token": supported("", "of what is pushed"),
    "hub_private_repo": supported("", "of what is pushed"),
    "hub_model_id": supported("", "of what is pushed; the name of the folder by default"),
    "hub_strategy": idle("what is pushed is the trained model, at the end."),
    "hub_always_push": idle("what is pushed is the trained model, at the end."),
    "hub_revision": supported("", "of what is pushed"),
    "load_best_model_at_end": supported(
        "",
        "the step of the best evaluation is saved when it is found; its weights are the model's at the end",
    ),
    "metric_for_best_model": supported(
        "", "of an evaluation, with or without `eval_`; loss with load_best_model_at_end"
    ),
    "greater_is_better": supported("", "by default unless the metric's name ends in loss"),
    "ignore_data_skip": refused("a resumed run goes on to the same bits, data included; leave it out."),
    "restore_callback_states_from_checkpoint": refused("what callbacks remember is not saved; leave it out."),
    "full_determinism": idle("on a CPU a run is a function of its seed, bit for bit."),
    "seed": supported("run.seed", numbers=whole(0)),
    "data_seed": refused("the order of rows is a function of `seed`; leave it out."),
    "use_cpu": supported("model.device"),
    "accelerator_config": refused(ONE_PROCESS + "  Leave it out."),
    "parallelism_config": refused(ONE_PROCESS + "  Leave it out."),
    "dataloader_drop_last": idle("rows that do not fill the last step of an epoch begin the next."),
    "dataloader_num_workers": idle(NO_DATALOADER),
    "dataloader_pin_memory": idle(NO_DATALOADER),
    "dataloader_persistent_workers": idle(NO_DATALOADER),
    "dataloader_prefetch_factor": idle(NO_DATALOADER),
    "dataloader_multiprocessing_context": idle(NO_DATALOADER),
    "dataloader_in_order": idle(NO_DATALOADER),
    "remove_unused_columns": refused("every column reaches the rewards; leave it out.", False, True, None),
    "label_names": idle("there are no labels."),
    "train_sampling_strategy": refused("prompts are drawn at random, or with shuffle_dataset=False in order."),
    "length_column_name": idle("nothing is grouped by length, and padding costs nothing here."),
    "ddp_find_unused_parameters": idle(ONE_PROCESS),
    "ddp_bucket_cap_mb": idle(ONE_PROCESS),
    "ddp_broadcast_buffers": idle(ONE_PROCESS),
    "ddp_static_graph": idle(ONE_PROCESS),
    "ddp_backend": idle(ONE_PROCESS),
    "ddp_timeout": idle(ONE_PROCESS),
    "fsdp": refused(ONE_PROCESS + "  Leave it out; posttrain plan says what fits.", "", []),
    "fsdp_config": refused(ONE_PROCESS + "  Leave it out; posttrain plan says what fits."),
    "deepspeed": refused(ONE_PROCESS + "  Leave it out; posttrain plan says what fits."),
    "debug": refused("a value that is not finite ends the run with its row; leave it out.", [], [""], None),
    "skip_memory_metrics": idle("summary.json has the peak of memory."),
    "do_train": idle("a trainer does what its methods are called for."),
    "do_eval": idle("a trainer does what its methods are called for."),
    "do_predict": idle("a trainer does what its methods are called for."),
    "resume_from_checkpoint": supported("", "as the argument of `train` of that name"),
    "local_rank": refused(ONE_PROCESS + "  Leave it out.", 0),
    "model_init_kwargs": supported(
        "model.*", "dtype, attn_implementation, revision, trust_remote_code, device_map, quantization_config"
    ),
    "trust_remote_code": supported("model.trust_remote_code"),
    "router_aux_loss_coef": refused("no loss of a router is added here.", 0.0, 0),
    "evaluation_strategy": translated("", "is read as eval_strategy."),
    "overwrite_output_dir": supported("run.overwrite", "deletes the run that the folder holds"),
    "logging_dir": idle("trackers write into the folder of the run."),
    "no_cuda": translated("model.device", "is read as use_cpu."),
    "save_safetensors": refused("weights are saved as safetensors; nothing else can be loaded safely."),
    "group_by_length": idle("nothing is grouped by length, and padding costs nothing here."),
}
