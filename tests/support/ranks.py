"""Functions run by several ranks, which are processes of this machine joined by gloo."""

import faulthandler
import io
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

SECONDS = 600.0
"""The limit of all that the ranks do."""


def run_ranks(size: int, function: Callable[[int], Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """What the function, called with the rank in each of these processes, returns on rank 0.

    Raises RuntimeError with the tracebacks of the ranks that failed.  The processes are forked from one that has
    imported the library, so that each takes no seconds to start.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "bitsandbytes", function.__module__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=_work, args=(rank, size, port, function, results)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        found = results.get(timeout=SECONDS)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    if isinstance(found, str):
        told = [found]
        while not results.empty():
            told.append(results.get())
        raise RuntimeError("\n".join(told))
    read: Mapping[Any, Any] = torch.load(io.BytesIO(found))
    return read


def _work(rank: int, size: int, port: int, function: Callable[[int], Mapping[Any, Any]], results: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SECONDS / 2)  # of a rank that hangs
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        found = function(rank)
        if rank == 0:
            written = io.BytesIO()
            torch.save(found, written)  # a tensor in a queue lives as long as its process
            results.put(written.getvalue())
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put(f"rank {rank}: {traceback.format_exc()}")
        raise


def mesh_of(size: int) -> DeviceMesh | None:
    """The first ranks as a mesh; None on the others.  All ranks call it."""
    group = dist.new_group(range(size))
    return DeviceMesh.from_group(group, "cpu") if dist.get_rank() < size else None
