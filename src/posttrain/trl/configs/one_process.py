"""What scripts ask of processes, devices and batch sizes: of their arguments and of `trainer.accelerator`."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from posttrain.models.loading.devices import chosen_device

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
        """There is nothing to wait for."""

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        yield

    local_main_process_first = main_process_first

    def unwrap_model(self, model: Value, *_: object, **__: object) -> Value:
        return model

    def gather(self, value: Value) -> Value:
        return value

    def on_main_process(self, function: Callable[..., Value]) -> Callable[..., Value]:
        return function

    gather_for_metrics = gather
    on_local_main_process = on_main_process

    def free_memory(self) -> None:
        torch.cuda.empty_cache()

    def end_training(self) -> None:
        """Trackers are closed when train() ends."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"accelerator.{name} is not here: posttrain's loop has no use for it.")


class ArgumentMethods:
    """Properties and methods of transformers' TrainingArguments, for one process on one device."""

    world_size: ClassVar[int] = 1
    process_index: ClassVar[int] = 0
    local_process_index: ClassVar[int] = 0
    should_save: ClassVar[bool] = True
    should_log: ClassVar[bool] = True
    place_model_on_device: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        given = vars(self)
        return chosen_device("cpu" if given["use_cpu"] or given["no_cuda"] else "auto")

    @property
    def n_gpu(self) -> int:
        """GPUs that train: at most one."""
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
        return int(vars(self)["per_device_train_batch_size"])

    @property
    def eval_batch_size(self) -> int:
        return int(vars(self)["per_device_eval_batch_size"])

    @property
    def ddp_timeout_delta(self) -> timedelta:
        return timedelta(seconds=vars(self)["ddp_timeout"])

    def get_process_log_level(self) -> int:
        """The level of `logging` that log_level names; `passive` is that of transformers."""
        from transformers.utils.logging import get_verbosity

        named = logging.getLevelNamesMapping().get(str(vars(self)["log_level"]).upper())
        return get_verbosity() if named is None else named

    def get_warmup_steps(self, num_training_steps: int) -> int:
        given = vars(self)["warmup_steps"] or vars(self)["warmup_ratio"] or 0
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
