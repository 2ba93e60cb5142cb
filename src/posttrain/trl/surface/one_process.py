"""What scripts ask accelerate of processes and devices, answered for one process on one device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

Any_ = TypeVar("Any_")
CHANGES_TRAINING = "training goes through posttrain's loop, which has no use for it"


class OneProcess:
    """`trainer.accelerator` and `args.distributed_state`: the only process, which is the main one."""

    num_processes = 1
    process_index = local_process_index = 0
    is_main_process = is_local_main_process = is_last_process = True
    use_distributed = False
    is_fsdp_enabled = is_fsdp2 = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def state(self) -> "OneProcess":
        """The same."""
        return self

    def print(self, *values: object, **given: Any) -> None:
        """Print, as the main process."""
        print(*values, **given)

    def wait_for_everyone(self) -> None:
        """Nobody else is waited for."""

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A block that no other process runs."""
        yield

    local_main_process_first = main_process_first

    def unwrap_model(self, model: Any_, *_: object, **__: object) -> Any_:
        """The model, which nothing wraps."""
        return model

    def gather(self, value: Any_) -> Any_:
        """The values of all processes."""
        return value

    gather_for_metrics = gather

    def on_main_process(self, function: Callable[..., Any_]) -> Callable[..., Any_]:
        """The function, which the main process runs."""
        return function

    on_local_main_process = on_main_process

    def free_memory(self) -> None:
        """Give unused memory of a GPU back."""
        torch.cuda.empty_cache()

    def end_training(self) -> None:
        """Trackers are closed when train() ends."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Say what else an Accelerator would do."""
            raise AttributeError(f"accelerator.{name} is not here: {CHANGES_TRAINING}.")
