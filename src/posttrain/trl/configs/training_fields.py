"""transformers' TrainingArguments: the fields that TRL's configs have, with TRL 1.16's names, order and defaults.

Also the attributes of arguments and of `trainer.accelerator` that scripts read: processes, devices, batch sizes.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import torch

from posttrain.models.loading.devices import chosen_device
from posttrain.trl.configs.field_rules import CheckedFields, Numbers, above, any_of, idle, ints, old_name, refused, sets

Value = TypeVar("Value")


class OneProcess:
    """`trainer.accelerator` and `args.distributed_state`: the only process, which is the main one."""

    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = is_last_process = True
    use_distributed = is_fsdp_enabled = is_fsdp2 = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def state(self) -> "OneProcess":
        return self

    def print(self, *values: object, **given: Any) -> None:
        print(*values, **given)

    def wait_for_everyone(self) -> None:
        """No effect: there is nothing to wait for, and trackers are closed when train() ends."""

    end_training = wait_for_everyone

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        yield

    local_main_process_first = main_process_first

    def unwrap_model(self, model: Value, *_: object, **__: object) -> Value:
        return model

    gather = gather_for_metrics = unwrap_model

    def on_main_process(self, function: Value) -> Value:
        return function

    on_local_main_process = on_main_process

    def free_memory(self) -> None:
        torch.cuda.empty_cache()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"accelerator.{name} is not here: posttrain's loop has no use for it.")


TextOrList = None | str | list[str]  # in the order that HfArgumentParser can read
TextOrFlag = str | None | Literal[True, False]  # the same
JsonMapping = dict[str, Any] | str | None
"""A mapping, or a mapping as JSON."""
OTHER_ADAMW = (
    "adamw_8bit adamw_bnb_8bit adamw_torch_8bit adamw_torch_4bit paged_adamw paged_adamw_8bit paged_adamw_32bit"
    " adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused"
)
"""Other names of AdamW, which change how the same update is computed, or how its moments are stored."""
AS_ADAMW = "is read as AdamW of torch, with moments in float32: 8 bytes a weight."
BOUND, EVERY = Numbers(0, infinite=True), Numbers(0, shares=True)
BATCHES = sets("rollout.prompts_per_step", "see the table of batches")
SAVED = sets("checkpoint.every_steps", "best: the best evaluation so far; the last step is always saved")
STRATEGY = any_of("no", "steps", "epoch")
ONE_PROCESS = idle("one process trains here, on one device.")
ALONE = refused(ONE_PROCESS.says + "  Leave it out.")
FITS = ONE_PROCESS.says + "  Leave it out; posttrain plan says what fits."
NO_DATALOADER = idle("rows are a list in memory, and prompts are rendered when they are drawn.")
ONLY_REWARDS = refused("what is measured is the reward; for another measure use a reward function of weight 0.")
NOTHING_KEPT = idle("an evaluation keeps nothing but its metrics.")
AS_IN_TRAINING = idle("an evaluation computes as training does.")
RECOMPUTED = idle("layers are computed again without reentrance.")
NOT_COMPILED = idle("nothing is compiled here.")
NOT_GROUPED = idle("nothing is grouped by length, and padding costs nothing here.")
LIGER = idle("log-probs are computed in chunks here, without that package.")
TRACKED_HERE = refused("runs are tracked on this machine; leave it out.")
PUSHED = sets("", "of what is pushed")
PUSHED_ONCE = idle("what is pushed is the trained model, at the end.")
BY_METHODS = idle("a trainer does what its methods are called for.")


@dataclass
class TrainingFields(CheckedFields):
    """The fields of all trainers."""

    recipe_section: ClassVar[str] = "update"
    world_size: ClassVar[int] = 1
    process_index: ClassVar[int] = 0
    local_process_index: ClassVar[int] = 0
    should_save: ClassVar[bool] = True
    should_log: ClassVar[bool] = True
    place_model_on_device: ClassVar[bool] = True

    output_dir: Annotated[str | None, sets("run.folder", "folder of the run; `trainer_output` by default")] = None
    per_device_train_batch_size: Annotated[
        int, ints(1), sets("rollout.prompts_per_step, update.tokens_per_microbatch", "counts completions, as in TRL")
    ] = 8
    num_train_epochs: Annotated[float, above(0), sets("run.num_steps", "in updates, as TRL counts them")] = 3.0
    max_steps: Annotated[int, ints(-1), sets("run.num_steps", "in updates; 0 and -1: num_train_epochs")] = -1
    learning_rate: Annotated[float, above(0), sets(".learning_rate", "as given, with an adapter too")] = 1e-06
    lr_scheduler_type: Annotated[
        str, any_of("linear", "cosine", "constant", "constant_with_warmup"), sets(".schedule")
    ] = "linear"
    lr_scheduler_kwargs: Annotated[JsonMapping, refused("give a scheduler in `optimizers` instead.", {})] = None
    warmup_steps: Annotated[float, Numbers(0), sets(".warmup_steps", "below 1 a share of all; begins with lr/w")] = 0
    optim: Annotated[
        str,
        refused(
            "AdamW of torch is the optimiser here; give another in `optimizers`.",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            reads=dict.fromkeys(OTHER_ADAMW.split(), AS_ADAMW),
        ),
    ] = "adamw_torch_fused"
    optim_args: Annotated[str | None, refused("give the optimiser itself in `optimizers`.")] = None
    weight_decay: Annotated[float, Numbers(0), sets(".weight_decay", "on matrices; of an adapter on A and B")] = 0.0
    adam_beta1: Annotated[float, Numbers(0, 1, below=True), sets(".beta1")] = 0.9
    adam_beta2: Annotated[float, Numbers(0, 1, below=True), sets(".beta2")] = 0.999
    adam_epsilon: Annotated[float, refused("AdamW's epsilon is 1e-8 here; give an optimiser in `optimizers`.")] = 1e-08
    optim_target_modules: Annotated[TextOrList, refused("GaLore is not here; give it in `optimizers`.")] = None
    gradient_accumulation_steps: Annotated[int, ints(1), BATCHES] = 1
    average_tokens_across_devices: Annotated[bool, ONE_PROCESS] = True
    max_grad_norm: Annotated[float | None, BOUND, sets(".max_grad_norm", "0 and None clip nothing")] = 1.0
    label_smoothing_factor: Annotated[float, refused("no label is smoothed here; leave it out.")] = 0.0
    bf16: Annotated[bool | None, sets("model.dtype", "on a GPU; on a CPU a line says that float32 is used")] = None
    fp16: Annotated[bool, sets("model.dtype", "as bf16 or float32, as float16 overflows; a line says which")] = False
    bf16_full_eval: Annotated[bool, AS_IN_TRAINING] = False
    fp16_full_eval: Annotated[bool, AS_IN_TRAINING] = False
    tf32: Annotated[bool | None, idle("matrix products follow `torch.set_float32_matmul_precision`.")] = None
    activation_checkpointing: Annotated[
        bool | None, old_name("model.gradient_checkpointing", "is read as gradient_checkpointing.")
    ] = None
    activation_checkpointing_kwargs: Annotated[JsonMapping, RECOMPUTED] = None
    gradient_checkpointing: Annotated[bool, sets("model.gradient_checkpointing", "off by default, unlike TRL")] = False
    gradient_checkpointing_kwargs: Annotated[JsonMapping, RECOMPUTED] = None
    torch_compile: Annotated[bool, NOT_COMPILED] = False
    torch_compile_backend: Annotated[str | None, NOT_COMPILED] = None
    torch_compile_mode: Annotated[str | None, NOT_COMPILED] = None
    use_liger_kernel: Annotated[bool, LIGER] = False
    liger_kernel_config: Annotated[JsonMapping, LIGER] = None
    use_cache: Annotated[bool, idle("sampling always has a key/value cache, training has none.")] = False
    neftune_noise_alpha: Annotated[float | None, refused("no noise is added to embeddings here; leave it out.")] = None
    torch_empty_cache_steps: Annotated[int | None, idle("memory is released after each micro-batch.")] = None
    auto_find_batch_size: Annotated[bool, refused("set per_device_train_batch_size to what fits in memory.")] = False
    logging_strategy: Annotated[str, STRATEGY, sets("", "when `state.log_history` grows")] = "steps"
    logging_steps: Annotated[
        float, Numbers(0, above=True, shares=True), sets("", "in updates, below 1 a share of all")
    ] = 10
    logging_first_step: Annotated[bool, sets("", "an entry after the first step too")] = False
    log_on_each_node: Annotated[bool, ONE_PROCESS] = True
    logging_nan_inf_filter: Annotated[bool, idle("a loss that is not finite ends the run before its update.")] = True
    include_num_input_tokens_seen: Annotated[bool | str, idle("`num_tokens` is always logged.", False)] = "no"
    log_level: Annotated[str, idle("a run prints its plan and its progress.")] = "passive"
    log_level_replica: Annotated[str, ONE_PROCESS] = "warning"
    disable_tqdm: Annotated[bool | None, idle("progress is a bar in a terminal and plain lines elsewhere.")] = None
    report_to: Annotated[TextOrList, sets("run.report_to", "tensorboard, wandb, mlflow and trackio")] = "none"
    run_name: Annotated[str | None, sets("tracker.name", "its folder by default")] = None
    project: Annotated[str, sets("tracker.project", "the package's name by default")] = "huggingface"
    trackio_space_id: Annotated[str | None, TRACKED_HERE] = None
    trackio_bucket_id: Annotated[str | None, TRACKED_HERE] = None
    trackio_static_space_id: Annotated[TextOrFlag, TRACKED_HERE] = None
    eval_strategy: Annotated[str, STRATEGY, sets("", "when there is an evaluation")] = "no"
    eval_steps: Annotated[float | None, EVERY, sets("", "in updates; 0 and None are logging_steps")] = None
    eval_delay: Annotated[float, Numbers(0), sets("", "updates, or epochs, before the first evaluation")] = 0
    per_device_eval_batch_size: Annotated[int, idle("rollout.max_rows bounds memory; no number depends on it.")] = 8
    prediction_loss_only: Annotated[bool, NOTHING_KEPT] = False
    eval_on_start: Annotated[bool, sets("", "an evaluation before the first step")] = False
    eval_do_concat_batches: Annotated[bool, NOTHING_KEPT] = True
    eval_use_gather_object: Annotated[bool, ONE_PROCESS] = False
    eval_accumulation_steps: Annotated[int | None, NOTHING_KEPT] = None
    include_for_metrics: Annotated[list[str], ONLY_REWARDS] = field(default_factory=list)
    batch_eval_metrics: Annotated[bool, ONLY_REWARDS] = False
    save_only_model: Annotated[bool, idle("a checkpoint is complete; save_total_limit=1 keeps one.")] = False
    save_strategy: Annotated[str, any_of("no", "steps", "epoch", "best"), SAVED] = "steps"
    save_steps: Annotated[float, EVERY, sets("checkpoint.every_steps", "in updates; 0: only the last")] = 500
    save_on_each_node: Annotated[bool, ONE_PROCESS] = False
    save_total_limit: Annotated[
        int | None, ints(-1), sets("checkpoint.keep_last", "0, -1 and None keep all; the best is kept too")
    ] = None
    enable_jit_checkpoint: Annotated[bool, idle("a signal ends the run after its step, with a checkpoint.")] = False
    push_to_hub: Annotated[bool, sets("", "once, after the last step")] = False
    hub_token: Annotated[str | None, PUSHED] = field(default=None, repr=False)
    hub_private_repo: Annotated[bool | None, PUSHED] = None
    hub_model_id: Annotated[str | None, sets("", "of what is pushed; the name of the folder by default")] = None
    hub_strategy: Annotated[str, PUSHED_ONCE] = "every_save"
    hub_always_push: Annotated[bool, PUSHED_ONCE] = False
    hub_revision: Annotated[str | None, PUSHED] = None
    load_best_model_at_end: Annotated[bool, sets("", "the best is saved when found, and loaded at the end")] = False
    metric_for_best_model: Annotated[str | None, sets("", "of an evaluation, with or without `eval_`")] = None
    greater_is_better: Annotated[bool | None, sets("", "by default unless the metric's name ends in loss")] = None
    ignore_data_skip: Annotated[bool, refused("a resumed run also resumes its data; leave it out.")] = False
    restore_callback_states_from_checkpoint: Annotated[bool, refused("callbacks are not saved; leave it out.")] = False
    full_determinism: Annotated[bool, idle("on a CPU a run is a function of its seed, bit for bit.")] = False
    seed: Annotated[int, ints(0), sets("run.seed")] = 42
    data_seed: Annotated[int | None, refused("the order of rows is a function of `seed`; leave it out.")] = None
    use_cpu: Annotated[bool, sets("model.device")] = False
    accelerator_config: Annotated[JsonMapping, ALONE] = None
    parallelism_config: Annotated[object | None, ALONE] = None
    dataloader_drop_last: Annotated[bool, idle("rows left over at the end of an epoch begin the next.")] = False
    dataloader_num_workers: Annotated[int, NO_DATALOADER] = 0
    dataloader_pin_memory: Annotated[bool, NO_DATALOADER] = True
    dataloader_persistent_workers: Annotated[bool, NO_DATALOADER] = False
    dataloader_prefetch_factor: Annotated[int | None, NO_DATALOADER] = None
    dataloader_multiprocessing_context: Annotated[str | None, NO_DATALOADER] = None
    dataloader_in_order: Annotated[bool, NO_DATALOADER] = True
    remove_unused_columns: Annotated[
        bool | None, refused("every column reaches the rewards; leave it out.", False, True, None)
    ] = False
    label_names: Annotated[list[str] | None, idle("there are no labels.")] = None
    train_sampling_strategy: Annotated[str, refused("use shuffle_dataset=False for rows in order.")] = "random"
    length_column_name: Annotated[str, NOT_GROUPED] = "length"
    ddp_find_unused_parameters: Annotated[bool | None, ONE_PROCESS] = None
    ddp_bucket_cap_mb: Annotated[int | None, ONE_PROCESS] = None
    ddp_broadcast_buffers: Annotated[bool | None, ONE_PROCESS] = None
    ddp_static_graph: Annotated[bool | None, ONE_PROCESS] = None
    ddp_backend: Annotated[str | None, ONE_PROCESS] = None
    ddp_timeout: Annotated[int, ONE_PROCESS] = 1800
    fsdp: Annotated[str | None, refused(FITS, "", [])] = None
    fsdp_config: Annotated[JsonMapping, refused(FITS)] = None
    deepspeed: Annotated[JsonMapping, refused(FITS)] = None
    debug: Annotated[
        str | list[str], refused("values that are not finite end the run.  Leave it out.", [], [""], None)
    ] = ""
    skip_memory_metrics: Annotated[bool, idle("summary.json has the peak of memory.")] = True
    do_train: Annotated[bool, BY_METHODS] = False
    do_eval: Annotated[bool, BY_METHODS] = False
    do_predict: Annotated[bool, BY_METHODS] = False
    resume_from_checkpoint: Annotated[TextOrFlag, sets("", "as the argument of `train` of that name")] = None
    local_rank: Annotated[int, refused(ONE_PROCESS.says + "  Leave it out.", 0)] = -1
    model_init_kwargs: Annotated[
        JsonMapping,
        sets("model.*", "dtype, attn_implementation, revision, trust_remote_code, device_map, quantization_config"),
    ] = None
    trust_remote_code: Annotated[bool, sets("model.trust_remote_code")] = False
    router_aux_loss_coef: Annotated[float | None, refused("no loss of a router is added here.", 0.0, 0)] = None
    # Names that these classes had once, and scripts still use.
    warmup_ratio: Annotated[
        float | None, Numbers(0, 1), old_name(".warmup_steps", "is read as warmup_steps, a share of all updates.")
    ] = None
    evaluation_strategy: Annotated[str | None, old_name("", "is read as eval_strategy.")] = None
    overwrite_output_dir: Annotated[bool, sets("run.overwrite", "deletes the run in the folder")] = False
    logging_dir: Annotated[str | None, idle("trackers write into the folder of the run.")] = None
    no_cuda: Annotated[bool, old_name("model.device", "is read as use_cpu.")] = False
    save_safetensors: Annotated[bool, refused("weights are saved as safetensors; nothing else loads safely.")] = True
    group_by_length: Annotated[bool, NOT_GROUPED] = False
    no_gradient_checkpointing: Annotated[bool, sets("model.gradient_checkpointing", "turns it off")] = False
    """The flag that parsers make from gradient_checkpointing, whose default is True in TRL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gradient_checkpointing = self.gradient_checkpointing and not self.no_gradient_checkpointing
        self.eval_strategy = self.evaluation_strategy or self.eval_strategy
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    @property
    def rows_per_update(self) -> int:
        """Rows, pairs or completions per update, as TRL counts them."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def device(self) -> torch.device:
        return chosen_device("cpu" if self.use_cpu or self.no_cuda else "auto")

    @property
    def n_gpu(self) -> int:
        """Number of GPUs for training: at most one."""
        return int(self.device.type == "cuda")

    @property
    def distributed_state(self) -> OneProcess:
        return OneProcess(self.device)

    @property
    def parallel_mode(self) -> object:
        from transformers.training_args import ParallelMode

        return ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        return timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """The `logging` level that log_level names; `passive` is transformers' level."""
        from transformers.utils.logging import get_verbosity

        named = logging.getLevelNamesMapping().get(str(self.log_level).upper())
        return get_verbosity() if named is None else named

    def get_warmup_steps(self, num_training_steps: int) -> int:
        given = self.warmup_steps or self.warmup_ratio or 0
        return -int(-num_training_steps * given // 1) if given < 1 else int(given)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        yield

    def to_dict(self) -> dict[str, Any]:
        """Names and values, without `hub_token`: scripts log what this returns."""
        given = dict(vars(self))
        return given if given["hub_token"] is None else given | {"hub_token": "<HUB_TOKEN>"}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Numbers and texts, for trackers."""
        plain = bool | int | float | str
        return {name: value if isinstance(value, plain) else str(value) for name, value in self.to_dict().items()}
