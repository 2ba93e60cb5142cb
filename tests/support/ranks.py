"""Functions run by several ranks, which are processes of this machine joined by gloo; the gradients of each step."""

import faulthandler
import io
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from posttrain.models.policy import Policy
from posttrain.models.sharding import over, part_like, whole, without_weights
from posttrain.ranks.group import Dealt, Item, RankGroup
from tests.support.forks import fork_context

SECONDS = 600.0
"""The limit of all that the ranks do."""
Gradients = Mapping[str, Tensor | None]


def run_ranks(size: int, function: Callable[[int], Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """What the function, called with the rank in each of these processes, returns on rank 0.

    Raises RuntimeError with the tracebacks of the ranks that failed.  The processes are forked (`forks`).
    """
    context = fork_context()
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
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        raise RuntimeError("\n".join([*told, f"exit codes by rank (below 0: a signal): {codes}"]))
    read: Mapping[Any, Any] = torch.load(io.BytesIO(found))
    return read


def _work(rank: int, size: int, port: int, function: Callable[[int], Mapping[Any, Any]], results: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # of a rank that a signal ends
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


class MeshRanks(RankGroup):
    """The ranks of a mesh, all of which run the same code."""

    num_dealt: int
    """Micro-batches that the ranks last shared out."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.rank, self.size, self._mesh = mesh.get_local_rank(), mesh.size(), mesh

    def mesh(self, device: torch.device) -> DeviceMesh:
        return self._mesh

    def deal(self, items: Sequence[Item], cost: Callable[[Item], int]) -> Iterator[Dealt[Item]]:
        self.num_dealt = len(items)
        return super().deal(items, cost)

    def gathered(self, value: Any) -> list[Any]:
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value, group=self._mesh.get_group())
        return boxes


def shared_by(mesh: DeviceMesh, policy: Policy, *, is_sent: bool = True) -> Policy:
    """The policy of a rank, which has weights on the first one only."""
    if mesh.get_local_rank() and is_sent:
        policy = over(policy, without_weights(policy.model, set()))
    return replace(policy, ranks=MeshRanks(mesh))


def trained(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{owner}.{name}": parameter
        for owner, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


@torch.no_grad()
def move(modules: Mapping[str, nn.Module]) -> None:
    """Move the trained weights, so that ratios are not 1 and no KL is 0."""
    for number, (_, parameter) in enumerate(sorted(trained(modules).items())):
        noise = np.random.Generator(np.random.Philox(number)).random(parameter.shape) - 0.5
        parameter += part_like(torch.from_numpy(noise * 0.05).to(parameter.dtype), parameter)


def gradients(modules: Mapping[str, nn.Module]) -> Gradients:
    grads = {name: parameter.grad for name, parameter in trained(modules).items()}
    return {name: None if grad is None else whole(grad).clone() for name, grad in grads.items()}


def require_one_gradient(one: Gradients, several: Gradients, tolerance: float) -> None:
    assert several.keys() == one.keys()
    whole_gradient = torch.cat([each.flatten() for each in one.values() if each is not None])
    assert whole_gradient.norm() > 1e-6
    for parameter, expected in one.items():
        found = several[parameter]
        assert (found is None) == (expected is None), parameter
        if expected is not None:
            scale = max(expected.norm(), 1e-3 * whole_gradient.norm())
            assert (found - expected).norm() <= tolerance * scale, parameter
