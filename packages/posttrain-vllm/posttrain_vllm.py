"""A weight-transfer engine for vLLM that reads safetensors files, as posttrain writes them after each step.

vLLM finds `register` by its entry point group `vllm.general_plugins` and calls it in every process.
"""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "safetensors_file"
"""Its name in `--weight-transfer-config`."""
READ_BYTES = 1 << 20


def register() -> None:
    """Add the backend to vLLM, once in each process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "engine_class")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_weights(path: str, sha256: str) -> dict[str, Any]:
    """The tensors of a file.  Raises ValueError, before any is read, if the file is not the one with this digest."""
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file on this machine.  Use a transfer_folder that trainer and server share.")
    if (found := file_digest(Path(path))) != sha256:
        raise ValueError(f"{path}: its SHA-256 is {found}, and {sha256} was announced.  Send the weights again.")
    return load_file(path)


class Lease:
    """The run that a server samples for, until it gives the server back or is silent for too long."""

    def __init__(self) -> None:
        self.owner, self.until = "", 0.0

    def take(self, owner: str, seconds: float, *, renews: bool) -> None:
        """Raises ValueError while another run has it, and if a run `renews` that has lost it."""
        left = self.until - time.monotonic()
        if self.owner not in ("", owner) and left > 0:
            remedy = f"End that run, or use another server; if it was killed, try again in {left:.0f} seconds"
            raise ValueError(f"this server samples for {self.owner[-120:]}.  {remedy}.")
        if renews and owner != self.owner:
            raise ValueError("this server is no longer yours: it was restarted, or another run has had it.  Update it.")
        self.owner, self.until = (owner if seconds else ""), time.monotonic() + seconds


def __getattr__(name: str) -> Any:
    """`engine_class`, whose bases are vLLM's, is made when vLLM asks for it."""
    if name != "engine_class":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return make_engine_class()


def make_engine_class() -> type:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        """Who the trainer is, how long it keeps the server after this, and whether it must have it already."""

        owner: str = ""
        lease_seconds: float = 0.0
        renews: bool = False

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        path: str = ""
        sha256: str = ""
        adapter: dict[str, Any] | None = None

    class SafetensorsFileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
        """Loads a whole model from one file, layer by layer.  Nothing changes before `finish_weight_update`."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        lease = Lease()

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.lease.take(init_info.owner, init_info.lease_seconds, renews=init_info.renews)

        def start_weight_update(self) -> None:
            self.tensors: dict[str, Any] | None = None

        def receive_weights(self, update_info: UpdateInfo) -> None:
            if update_info.adapter is not None:
                raise ValueError(f"{update_info.path}: is an adapter.  Send merged weights.")
            self.tensors = checked_weights(update_info.path, update_info.sha256)

        def finish_weight_update(self) -> None:
            if self.tensors is None:
                raise ValueError("no weights were given: update_weights comes first")
            tensors, self.tensors = self.tensors, None
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied_head(self.model)

        def shutdown(self) -> None:
            """Nothing is held open."""

    return SafetensorsFileEngine


def repack_tied_head(model: Any) -> None:
    """Pack a tied output head again: vLLM's CPU build multiplies by a packed copy, and reloads only the embedding."""
    from vllm.platforms import current_platform

    head = getattr(model, "lm_head", None)
    if not current_platform.is_cpu() or head is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
