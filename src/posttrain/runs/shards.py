"""Tensors of a checkpoint of several ranks: torch.distributed.checkpoint writes each rank's parts, as safetensors.

Each file holds parts of tensors and says in its header where they belong, so that any number of ranks can read them.
Unlike the usual format of torch.distributed.checkpoint there is no pickle, which could run code.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from posttrain.runs.tensor_state import Tensors

BETWEEN = "/"
"""Between the group of a tensor, such as `policy`, and its name there."""


def write_shards(folder: Path, tensors: Mapping[str, Tensors]) -> None:
    """Write this rank's parts; on the disk when it returns.  All ranks call it together."""
    named = {f"{group}{BETWEEN}{name}": tensor for group, some in tensors.items() for name, tensor in some.items()}
    with failing_as_one():
        save(named, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    for file in folder.glob(f"shard-{dist.get_rank() + 1:05}-*"):
        with file.open("rb+") as content:
            os.fsync(content.fileno())
    dist.barrier()  # rank 0 renames the folder next


def read_shards(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The whole tensors, by group and name, on the CPU."""
    reader = HuggingFaceStorageReader(str(folder))
    found: dict[str, Tensor] = {}
    for name, described in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(described, TensorStorageMetadata), "only tensors are written"
        found[name] = torch.empty(described.size, dtype=described.properties.dtype)
    with failing_as_one(), warnings.catch_warnings(action="ignore"):  # that no process group is used, which is meant
        load(found, storage_reader=reader, no_dist=True)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        group, _, own = name.partition(BETWEEN)
        groups.setdefault(group, {})[own] = tensor
    return groups


@contextmanager
def failing_as_one() -> Iterator[None]:
    """Raise the error of the first rank that failed, on all ranks; torch raises a BaseException with tracebacks."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items(), key=lambda each: each[0])
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, f"{error.strerror} (rank {rank})") from None
        raise error from failed
