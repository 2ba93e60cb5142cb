"""Tensors of a checkpoint of several ranks: torch.distributed.checkpoint writes each rank's parts, as safetensors.

Each file holds parts of tensors, and its header says where they belong, so any number of ranks can read them.
Unlike torch.distributed.checkpoint's usual format, it does not contain pickles, which could run code.
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

from posttrain.runs.tensor_state import PartedTensors, Tensors

BETWEEN = "/"
"""Separator between the group of a tensor, such as `policy`, and its name in the group."""
FILE_BYTES, MOST_FILES = 2**27, 64
"""Whole tensors of this size, or of a 64th of all, are in one file of each rank: torch copies a file to write it."""


def write_shards(folder: Path, tensors: Mapping[str, Tensors]) -> None:
    """Write this rank's parts; they are on disk when it returns.  All ranks call it together."""
    named = {f"{group}{BETWEEN}{name}": tensor for group, some in tensors.items() for name, tensor in some.items()}
    with failing_as_one(names_rank=True):
        save(named, storage_writer=HuggingFaceStorageWriter(str(folder), numbered_files(named), save_distributed=True))
    for file in folder.glob(f"shard-{dist.get_rank() + 1:05}-*"):
        with file.open("rb+") as content:
            os.fsync(content.fileno())
    dist.barrier()  # rank 0 renames the folder next


def numbered_files(tensors: Tensors) -> dict[str, int]:
    """The file of each tensor, the same on all ranks."""
    whole, before = sum(tensor.nbytes for tensor in tensors.values()), 0
    count, found = min(MOST_FILES, 1 + whole // FILE_BYTES), dict[str, int]()
    for name, tensor in tensors.items():
        found[name] = 1 + before * count // whole
        before += tensor.nbytes
    return found


class ShardTensors(PartedTensors):
    """Tensors of one group of a checkpoint."""

    def __init__(self, folder: Path, stored: Mapping[str, tuple[str, TensorStorageMetadata]]) -> None:
        """`stored` are the keys in the files and descriptions of the tensors, by name."""
        self.folder, self.stored = folder, stored
        self.described = {
            name: torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, (_, found) in stored.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        whole = torch.empty_like(self.described[name], device="cpu")
        self.read_into({name: whole})
        return whole

    def read_into(self, targets: Tensors) -> None:
        wanted = {self.stored[name][0]: target for name, target in targets.items()}
        if not wanted:
            return
        reader = HuggingFaceStorageReader(str(self.folder))
        # That no process group is used is meant: each rank reads its own parts.
        with failing_as_one(), warnings.catch_warnings(action="ignore"):
            load(wanted, storage_reader=reader, no_dist=True)

    def renamed(self, names: Mapping[str, str]) -> "ShardTensors":
        return ShardTensors(self.folder, {new: self.stored[name] for name, new in names.items()})


class ShardGroups(dict[str, ShardTensors]):
    """The tensors of a checkpoint by group; each is only read when it is requested.

    Groups without tensors, such as an optimiser before its first update, are in no file.
    """

    def __init__(self, folder: Path, groups: Mapping[str, ShardTensors]) -> None:
        super().__init__(groups)
        self.folder = folder

    def __missing__(self, name: str) -> ShardTensors:
        return ShardTensors(self.folder, {})


def read_shards(folder: Path) -> ShardGroups:
    groups: dict[str, dict[str, tuple[str, TensorStorageMetadata]]] = {}
    for key, described in HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items():
        assert isinstance(described, TensorStorageMetadata), "only tensors are written"
        group, _, name = key.partition(BETWEEN)
        groups.setdefault(group, {})[name] = key, described
    return ShardGroups(folder, {group: ShardTensors(folder, stored) for group, stored in groups.items()})


@contextmanager
def failing_as_one(*, names_rank: bool = False) -> Iterator[None]:
    """Raise the error of the first rank that failed, on all ranks; torch raises a BaseException with tracebacks.

    `names_rank` is for what ranks do together: for torch, a process that reads by itself is rank 0.
    """
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items(), key=lambda each: each[0])
        if isinstance(error, OSError) and error.errno is not None:
            where = f" (rank {rank})" if names_rank else ""
            raise OSError(error.errno, f"{error.strerror}{where}") from None
        raise error from failed
