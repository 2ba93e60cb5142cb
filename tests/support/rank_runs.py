"""Ranks of one run, each in a process that is forked from one that has loaded the library."""

import socket
from collections.abc import Sequence
from pathlib import Path

from tests.support.runs import Command, Ended, start


def environments(count: int) -> list[dict[str, str]]:
    """The variables of each rank, as torchrun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(count)]


def start_ranks(*argv: object, folder: Path, count: int = 2, last: Sequence[object] = ()) -> list[Command]:
    """Begin `posttrain ARGV` as ranks, the last of them with more arguments."""
    started = []
    for rank, environment in enumerate(environments(count)):
        logs = folder / f"rank-{rank}"
        logs.mkdir(exist_ok=True)
        more = last if rank == count - 1 else ()
        started.append(start(*argv, *more, folder=folder, logs=logs, environment=environment))
    return started


def ended_ranks(started: Sequence[Command], timeout: float = 60) -> list[Ended]:
    """How each rank ended."""
    try:
        return [each.ended(timeout) for each in started]
    finally:
        for each in started:
            each.process.kill()


def by_ranks(*argv: object, folder: Path, count: int = 2) -> Ended:
    """How rank 0 ended; all ranks must end alike."""
    first, *others = ended_ranks(start_ranks(*argv, folder=folder, count=count))
    assert all((each.code, each.out + each.err) == (first.code, "") for each in others), others
    return first
