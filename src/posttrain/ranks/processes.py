"""Several ranks over torch.distributed: calls of rank 0, collectives, and the failures of other ranks."""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posttrain.errors import RunError, ToldElsewhere, UserError
from posttrain.ranks.group import RankGroup, Result

LOOK_SECONDS = 1.0
"""How often a waiting rank looks whether rank 0 is alive."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between looks for the next call of rank 0."""
TOLD_WITHIN_SECONDS = 2.0
"""How long a rank whose connection broke waits for the message of the one that failed."""
OF_THE_GROUP = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting")
"""Texts in the errors of collectives."""
DONE = "done"
"""What a rank says of its share, in place of signs of progress."""
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
JOINED = count()
"""Groups of this process so far: each has keys of its own in the store."""


class RankProcesses(RankGroup):
    """Ranks that are processes, each with an equal copy or a shard of the weights."""

    def __init__(self, rank: int, size: int, server: TCPStore, *, timeout_seconds: float) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.number = next(JOINED)
        self.job, self.store = self.keys(server)
        self._calls, self._inside = 0, False
        self._mesh: DeviceMesh | None = None
        self._alive, self._alive_since = b"", time.monotonic()
        self.store.set(f"process/{rank}", f"{socket.gethostname()} {os.getpid()}")

    def keys(self, server: TCPStore) -> tuple[Store, Store]:
        """The keys of this job, and of this attempt under torchrun: those of a dead one hold stale addresses."""
        job = PrefixStore(f"posttrain {self.number}", server)
        return job, PrefixStore(f"attempt {os.environ.get(ATTEMPT, '0')}", job)

    @contextmanager
    def leading(self, call: str, *given: object) -> Iterator[None]:
        if self.rank or self._inside:
            yield
            return
        self._inside = True
        try:
            self._calls += 1
            self.store.set(f"call/{self._calls}", call)
            self.broadcast((call, given))
            yield
        finally:
            self._inside = False

    def next_call(self) -> tuple[str, tuple[Any, ...]]:
        self._calls += 1
        key, self._alive_since, pause = f"call/{self._calls}", time.monotonic(), SHORTEST_PAUSE
        looked = self._alive_since
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_PAUSE)
            if time.monotonic() - looked > LOOK_SECONDS:
                self.require_leader()
                looked = time.monotonic()
        nothing: tuple[str, tuple[Any, ...]] = ("", ())
        return self.broadcast(nothing)

    def finish(self, result: Result) -> Result:
        with self.leading("end", result):
            return result

    def broadcast(self, value: Result) -> Result:
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        received: Result = box[0]
        return received

    def gathered(self, value: Result) -> list[Result]:
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def agree(self, what: str, digest: Callable[[], str]) -> None:
        found = self.gathered((digest(), self.asked))
        others = [rank for rank, (each, _) in enumerate(found) if each != found[0][0]]
        if others:
            raise RunError(
                f"{what} of rank {', '.join(map(str, others))} differ from those of rank 0, so gradients would be of"
                " different steps.  Use the same recipe, files, versions and kind of processor for all ranks."
            )
        self.signal = next((asked for _, asked in found if asked), "")

    def mesh(self, device: torch.device) -> DeviceMesh:
        if self._mesh is None:
            self._mesh = init_device_mesh(device.type, (self.size,))
        return self._mesh

    def at_work(self, *, done: bool = False) -> None:
        self.store.set(f"share/{self.rank}", f"{self._calls} {DONE if done else time.monotonic()}")

    def wait_for_others(self) -> None:
        looked, pause, finished = time.monotonic(), SHORTEST_PAUSE, f"{self._calls} {DONE}"
        waiting = dict.fromkeys(range(1, self.size), ("", looked))
        while waiting:
            for rank, (before, heard) in list(waiting.items()):
                known = self.store.check([f"share/{rank}"])
                said, now = self.store.get(f"share/{rank}").decode() if known else "", time.monotonic()
                if said == finished:
                    del waiting[rank]
                elif said != before:
                    waiting[rank] = said, now
                elif now - heard > self.timeout_seconds:
                    limit = f"run.rank_timeout_seconds = {self.timeout_seconds:g}"
                    raise RunError(f"rank {rank} made no progress within {limit}.  {CONTINUE}")
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                if self.store.check(["failed"]) or self._dead():
                    raise self.lost("")
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_PAUSE)

    @contextmanager
    def naming_peers(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or any(text in str(error) for text in OF_THE_GROUP)):
                raise
            raise self.lost(str(error)) from error

    def lost(self, said: str) -> RunError:
        """The error of a rank whose group broke: the message of the rank that failed, or which one died."""
        until = time.monotonic() + TOLD_WITHIN_SECONDS
        try:
            while not self.store.check(["failed"]) and time.monotonic() < until:
                time.sleep(0.05)
            if self.store.check(["failed"]):
                told = json.loads(self.store.get("failed"))
                return self._told(told["rank"], told["message"], told["exit_code"])
            dead = self._dead()
        except RuntimeError:  # the store has ended with the process that held it
            dead = [0]
        if dead:
            return RunError(f"{' and '.join(f'rank {each}' for each in dead)} died without a message.  {CONTINUE}")
        first, seconds = said.strip().splitlines()[0][:300], f"run.rank_timeout_seconds = {self.timeout_seconds:g}"
        return RunError(f"a rank ended, or did not answer within {seconds} ({first}).  {CONTINUE}")

    def _told(self, rank: int, message: str, exit_code: int) -> RunError:
        if rank == 0 or self.rank:  # rank 0 prints its own message and those of the others
            return ToldElsewhere(message, exit_code)
        return RunError(f"rank {rank}: {message}")

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks what ended this one, unless one of them failed first."""
        if self.store.check(["failed"]):
            return
        if not isinstance(error, UserError | KeyboardInterrupt):
            print(f"posttrain: rank {self.rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
        message = str(error) or type(error).__name__
        told = {"rank": self.rank, "message": message, "exit_code": getattr(error, "exit_code", 1)}
        self.store.set("failed", json.dumps(told))

    def last_error(self, error: BaseException) -> BaseException:
        """What this rank ends with: its own error, which the others learn of, or that of the rank that failed first."""
        code = getattr(error, "exit_code", 1)
        try:
            failed_before, dead = self.store.check(["failed"]), self._dead()
            if isinstance(error, KeyboardInterrupt) and (failed_before or dead):
                return self.lost("")  # a starter ends all ranks when one has failed
            self.tell(error)
        except RuntimeError:  # the store has ended with rank 0, which has said why
            return ToldElsewhere(str(error), code)
        if self.rank and (failed_before or 0 not in dead):
            return ToldElsewhere(str(error), code)
        return error

    def require_leader(self) -> None:
        if self.store.check(["failed"]):
            raise self.lost("")
        now, alive = time.monotonic(), self.store.get("alive")
        if alive != self._alive:
            self._alive, self._alive_since = alive, now
        if 0 in self._dead():
            raise RunError(f"rank 0 died without a message.  {CONTINUE}")
        if now - self._alive_since > self.timeout_seconds:
            limit = f"run.rank_timeout_seconds = {self.timeout_seconds:g}"
            raise RunError(f"rank 0 gave no sign of life within {limit}.  {CONTINUE}")

    def _dead(self) -> list[int]:
        """Other ranks of this machine whose process has ended."""
        found = []
        for rank in range(self.size):
            if rank == self.rank or not self.store.check([f"process/{rank}"]):
                continue
            host, process = self.store.get(f"process/{rank}").decode().rsplit(" ", 1)
            if host == socket.gethostname() and not is_running(int(process)):
                found.append(rank)
        return found

    def has_begun(self) -> bool:
        return bool(self.job.check(["begun"]))

    def begins(self) -> None:
        self.job.set("begun", "yes")


CONTINUE = "Continue from the last checkpoint with --resume RUN (in Python train(config, resume=True))."


def is_running(process: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc").is_dir()


@contextmanager
def joined_processes(timeout_seconds: float) -> Iterator[RankProcesses]:
    """Join the group that the environment describes.  A failed rank tells the others, which end as well."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks, ours = joined_group(rank, size, timeout_seconds), not dist.is_initialized()
    ended = threading.Event()
    try:
        if ours:
            start_group(ranks)
        if rank == 0:
            threading.Thread(target=show_life, args=(ranks, ended), daemon=True).start()
        with ranks.naming_peers():
            yield ranks
    except GeneratorExit:  # the caller of `steps` wants no more of them
        ranks.finish(None)
        raise
    except ToldElsewhere:
        raise
    except BaseException as error:
        ended_with = ranks.last_error(error)
        if ended_with is error:
            raise
        raise ended_with from error
    finally:
        ended.set()
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def joined_group(rank: int, size: int, timeout_seconds: float) -> RankProcesses:
    """The group, whose ranks know each other's keys and are not connected yet."""
    ranks = RankProcesses(rank, size, store_of_process(rank), timeout_seconds=timeout_seconds)
    if rank == 0:
        ranks.store.set("alive", "0")
    return ranks


@cache
def store_of_process(rank: int) -> TCPStore:
    """Held as long as the process: where rank 0 is the host of the store, others read it until they end."""
    return connection(rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")


def connection(is_host: bool = False) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=is_host, wait_for_workers=False)


def start_group(ranks: RankProcesses) -> None:
    """Connect the ranks: by gloo, and on GPUs by NCCL."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=PrefixStore("group", ranks.store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=ranks.timeout_seconds),
    )


def show_life(ranks: RankProcesses, ended: threading.Event) -> None:
    """Say every few seconds that rank 0 is alive, over a connection of its own."""
    try:
        _, store = ranks.keys(connection())
        for number in count(1):
            store.set("alive", str(number))
            if ended.wait(min(5.0, ranks.timeout_seconds / 4)):
                return
    except RuntimeError:
        return  # the store has ended, and the run with it
