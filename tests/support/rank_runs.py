"""Ranks of one run, each in a process that is forked from one that has loaded the library."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.accidents import Accident
from tests.support.runs import NO_ACCIDENT, Command, Ended, start

WAITING = """
import time
from pathlib import Path
from dice import dice

HERE = Path(__file__).parent
calls = []

def patient(completions, **columns):
    calls.append("call")
    if len(calls) == 3:
        (HERE / "in_step_3").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
    return dice(completions)
"""
"""A reward that waits in step 3 for a file `go`."""
NOWHERE: Mapping[int, Accident] = {}


def environments(count: int) -> list[dict[str, str]]:
    """The variables of each rank, as torchrun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(count)]


def start_ranks(
    *argv: object,
    folder: Path,
    count: int = 2,
    last: Sequence[object] = (),
    accidents: Mapping[int, Accident] = NOWHERE,
) -> list[Command]:
    """Begin `posttrain ARGV` as ranks, the last of them with more arguments; accidents happen to some."""
    started = []
    for rank, environment in enumerate(environments(count)):
        logs = folder / f"rank-{rank}"
        logs.mkdir(exist_ok=True)
        more = last if rank == count - 1 else ()
        accident = accidents.get(rank, NO_ACCIDENT)
        started.append(start(*argv, *more, folder=folder, logs=logs, environment=environment, accident=accident))
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
