"""What ranks know about each other apart from collectives: texts in the store of their starter, and signs of life.

A store that cannot be reached does not answer while the network is cut, so each call has a time limit.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from signal import SIGCONT

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError

from posttrain.errors import UserError
from posttrain.ranks.group import Result

BEAT_SECONDS = 1.0
"""Between two signs of life of a rank."""
SILENT_SECONDS = 5.0
"""A rank without a sign of life for this long has ended, hangs, or cannot be reached."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class RankStore:
    """The texts of one group of ranks.  A call raises DistNetworkError where the store does not answer in time."""

    def __init__(self, rank: int, size: int, number: int, *, seconds: float) -> None:
        """`number` tells the groups of a process apart; `seconds` is the time limit of connecting and of a call."""
        self.rank, self.number, self.limit_seconds = rank, number, seconds
        self.seconds = seconds
        """How long a call waits now: less than its limit after the store could not be reached."""
        self.others = [each for each in range(size) if each != rank]
        self._processes: dict[int, tuple[str, int]] = {}
        """Machine and process of other ranks, if known."""
        self.job, self.attempt = self.keys(store_of_process(rank, seconds))
        self.write(f"process/{rank}", f"{machine()} {os.getpid()}")

    def keys(self, server: TCPStore) -> tuple[Store, Store]:
        """The keys of this job, and of this attempt under torchrun: those of a dead one hold stale addresses."""
        job = PrefixStore(f"posttrain {self.number}", server)
        return job, PrefixStore(f"attempt {os.environ.get(ATTEMPT, '0')}", job)

    def read(self, key: str) -> str:
        """The text of a key; "" where none was written."""
        return self._answer(lambda: self.attempt.get(key).decode() if self.attempt.check([key]) else "")

    def write(self, key: str, text: str) -> None:
        self._answer(lambda: self.attempt.set(key, text))

    def has_begun(self) -> bool:
        return self._answer(lambda: self.job.check(["begun"]))

    def begins(self) -> None:
        self._answer(lambda: self.job.set("begun", "yes"))

    def _answer(self, call: Callable[[], Result]) -> Result:
        answer: Future[Result] = Future()

        def make() -> None:
            try:
                answer.set_result(call())
            except RuntimeError as error:
                answer.set_exception(error)

        threading.Thread(target=make, name="rank store", daemon=True).start()
        try:
            return answer.result(self.seconds)
        except TimeoutError:
            self.seconds = 0.0  # no other call waits for a store that is out of reach
            raise DistNetworkError(f"{store_address()} did not answer in {self.limit_seconds:g} seconds") from None

    def not_started(self) -> list[int]:
        """Other ranks that have never reached the store."""
        with suppress(RuntimeError):  # unknown
            return [rank for rank in self.others if not self.read(f"process/{rank}")]
        return []

    def ended(self) -> list[int]:
        """Other ranks of this machine whose process has ended."""
        for rank in self.others:
            if rank not in self._processes and (text := self.read(f"process/{rank}")):
                place, _, process = text.rpartition(" ")
                self._processes[rank] = place, int(process)
        known, here = self._processes.items(), machine()
        return [rank for rank, (place, process) in known if place == here and not is_running(process)]

    def wake_others(self) -> None:
        """Continue stopped ranks of this machine: while stopped, they would ignore a starter that ends them."""
        for place, process in self._processes.values():
            if place == machine():
                with suppress(OSError):
                    os.kill(process, SIGCONT)

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Those that have given no sign of life for a while."""
        before, until = {rank: self.read(f"alive/{rank}") for rank in ranks}, time.monotonic() + SILENT_SECONDS
        while before and time.monotonic() < until:
            time.sleep(0.1)
            before = {rank: sign for rank, sign in before.items() if self.read(f"alive/{rank}") == sign}
        return [*before]

    def show_life(self, done: threading.Event) -> None:
        """Report regularly that this rank is alive, over its own connection."""
        try:
            _, store = self.keys(connected(self.limit_seconds))
            for number in count(1):
                store.set(f"alive/{self.rank}", str(number))
                if done.wait(BEAT_SECONDS):
                    return
        except (RuntimeError, UserError):
            return  # the store has ended, and the run with it


@cache
def store_of_process(rank: int, seconds: float) -> TCPStore:
    """Kept as long as the process: if rank 0 hosts the store, others read it until they end."""
    return connected(seconds, is_host=holds_store(rank))


def holds_store(rank: int) -> bool:
    """Whether the store is in this process, and not in a starter's."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connected(seconds: float, *, is_host: bool = False) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        limit = timedelta(seconds=seconds)
        # One process listens once, also if its next run has another limit.
        return TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=limit, multi_tenant=is_host)
    except DistNetworkError as error:
        remedy = "Set MASTER_PORT to a free port." if is_host else "Check that rank 0 runs there, and the port is open."
        raise UserError(f"{store_address()}: {str(error).splitlines()[0].rstrip('.')}.  {remedy}") from error


def store_address() -> str:
    return f"MASTER_ADDR = {os.environ['MASTER_ADDR']}, MASTER_PORT = {os.environ['MASTER_PORT']}"


def machine() -> str:
    """A place where a number names one process: a host, or a container that only sees its own processes."""
    marks = [socket.gethostname()]
    with suppress(OSError):  # Linux has them
        marks += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return "/".join(marks)


def is_running(process: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc").is_dir()
