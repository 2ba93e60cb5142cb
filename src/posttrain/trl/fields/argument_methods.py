"""What scripts ask of their arguments besides fields: the process, its device, batch sizes, JSON."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch

from posttrain.models.loading.devices import chosen_device
from posttrain.trl.surface.one_process import OneProcess


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
        """Where the model trains."""
        given = vars(self)
        return chosen_device("cpu" if given["use_cpu"] or given["no_cuda"] else "auto")

    @property
    def n_gpu(self) -> int:
        """GPUs that train: one where there is one."""
        return int(self.device.type == "cuda")

    @property
    def distributed_state(self) -> OneProcess:
        """The only process."""
        return OneProcess(self.device)

    @property
    def parallel_mode(self) -> object:
        """How processes share the work, as transformers names it: not at all."""
        from transformers.training_args import ParallelMode

        return ParallelMode.NOT_PARALLEL

    @property
    def train_batch_size(self) -> int:
        """Rows on the device in training."""
        return int(vars(self)["per_device_train_batch_size"])

    @property
    def eval_batch_size(self) -> int:
        """Rows on the device in an evaluation."""
        return int(vars(self)["per_device_eval_batch_size"])

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """How long processes would wait for each other."""
        return timedelta(seconds=vars(self)["ddp_timeout"])

    def get_process_log_level(self) -> int:
        """The level of `logging` that log_level names; `passive` is that of transformers."""
        from transformers.utils.logging import get_verbosity

        named = logging.getLevelNamesMapping().get(str(vars(self)["log_level"]).upper())
        return get_verbosity() if named is None else named

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Updates of the warm-up, of so many."""
        given = vars(self)["warmup_steps"] or vars(self)["warmup_ratio"] or 0
        return -int(-num_training_steps * given // 1) if given < 1 else int(given)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """A block that no other process runs."""
        yield

    def to_dict(self) -> dict[str, Any]:
        """Names and values; `hub_token` is left out, since scripts log what this returns."""
        given = dict(vars(self))
        return given if given["hub_token"] is None else given | {"hub_token": "<HUB_TOKEN>"}

    def to_json_string(self) -> str:
        """The same as JSON; what JSON has not is text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same for trackers, which take numbers and texts."""
        plain = bool | int | float | str
        return {name: value if isinstance(value, plain) else str(value) for name, value in self.to_dict().items()}
