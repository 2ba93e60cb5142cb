"""Several ranks over torch.distributed: calls of rank 0, collectives, and the failures of other ranks."""

import ctypes
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from posttrain.errors import RunError, ToldElsewhere, UserError
from posttrain.ranks.group import RankGroup, Result
from posttrain.ranks.rank_store import RankStore, holds_store, store_address

LOOK_SECONDS = 1.0
"""How often a waiting rank checks that rank 0 is alive."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between checks for the next call of rank 0."""
TOLD_WITHIN_SECONDS = 2.0
"""How long a rank with a broken connection waits for the message of the rank that failed."""
OF_THE_GROUP = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Timed out waiting")
"""Texts in the errors of collectives."""
DONE = "done"
"""What a rank reports when its share is done, in place of signs of progress."""
CONTINUE = "Continue from the last checkpoint with --resume RUN (in Python train(config, resume=True))."
MMAP_THRESHOLD, LARGE_BYTES = -3, 2**20
"""The number of glibc's option (malloc.h: M_MMAP_THRESHOLD), and the smallest tensor that it is set for."""
JOINED = count()
"""Groups of this process so far: each has its own keys in the store."""


class RankProcesses(RankGroup):
    """Ranks that are processes, each with an equal copy or a shard of the weights."""

    def __init__(self, rank: int, size: int, *, timeout_seconds: float) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.store = RankStore(rank, size, next(JOINED), seconds=timeout_seconds)
        self._calls, self._meetings, self._inside = 0, 0, False
        self._mesh: DeviceMesh | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        """The last sign of life of ranks that this one waits for, and when it came."""
        self._gone: list[int] = []
        """Ranks that cannot report how they ended."""

    @contextmanager
    def leading(self, call: str, *given: object) -> Iterator[None]:
        if self.rank or self._inside:
            yield
            return
        self._inside = True
        try:
            self._calls += 1
            self.store.write(f"call/{self._calls}", call)
            self.broadcast((call, given))
            yield
        finally:
            self._inside = False

    def next_call(self) -> tuple[str, tuple[Any, ...]]:
        self._calls += 1
        self._wait_for(f"call/{self._calls}", 0)
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

    def meet(self) -> None:
        self._meetings += 1
        self.store.write(f"met/{self._meetings}/{self.rank}", "yes")
        for rank in self.store.others:
            self._wait_for(f"met/{self._meetings}/{rank}", rank)

    def _wait_for(self, key: str, rank: int) -> None:
        """Until this rank writes the key."""
        looked, pause = time.monotonic(), SHORTEST_PAUSE
        self._heard[rank] = "", looked
        while not self.store.read(key):
            time.sleep(pause)
            pause = min(1.2 * pause, LONGEST_PAUSE)
            if time.monotonic() - looked > LOOK_SECONDS:
                self._require_alive(rank)
                looked = time.monotonic()

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
        self.store.write(f"share/{self.rank}", f"{self._calls} {DONE if done else time.monotonic()}")

    def wait_for_others(self) -> None:
        looked, pause, finished = time.monotonic(), SHORTEST_PAUSE, f"{self._calls} {DONE}"
        waiting = dict.fromkeys(range(1, self.size), ("", looked))
        while waiting:
            for rank, (before, heard) in list(waiting.items()):
                said, now = self.store.read(f"share/{rank}"), time.monotonic()
                if said == finished:
                    del waiting[rank]
                elif said != before:
                    waiting[rank] = said, now
                elif now - heard > self.timeout_seconds:
                    limit = f"run.rank_timeout_seconds = {self.timeout_seconds:g}"
                    raise RunError(f"rank {rank} made no progress within {limit}.  {CONTINUE}")
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                if self.store.read("failed") or self.store.ended():
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
        """The error of a rank whose group broke: the message of the rank that failed, or which one is gone."""
        until = time.monotonic() + TOLD_WITHIN_SECONDS
        self.store.seconds = min(self.store.seconds, TOLD_WITHIN_SECONDS)  # it may be out of reach as well
        try:
            while not (told := self.store.read("failed")) and time.monotonic() < until:
                time.sleep(0.05)
            if told:
                return self._told(**json.loads(told))
            self._gone, how = self.store.ended(), "died without a message"
            if not self._gone:
                self._gone, how = self.store.silent(self.store.others), "gave no sign of life"
        except RuntimeError:  # the store ended with the process that held it, or cannot be reached
            self._gone, who = ([0], "rank 0") if holds_store(0) else ([], "the process that started rank 0")
            return RunError(f"{store_address()}: {who} ended, or its machine cannot be reached.  {CONTINUE}")
        if self._gone:
            return RunError(f"{' and '.join(f'rank {each}' for each in self._gone)} {how}.  {CONTINUE}")
        first, seconds = said.strip().partition("\n")[0][:300], f"run.rank_timeout_seconds = {self.timeout_seconds:g}"
        return RunError(f"a rank ended, or did not answer within {seconds} ({first}).  {CONTINUE}")

    def _told(self, *, rank: int, message: str, exit_code: int) -> RunError:
        if rank == 0 or self.rank:  # rank 0 prints its own message and those of the others
            return ToldElsewhere(message, exit_code)
        return RunError(f"rank {rank}: {message}")

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks why this one ended, unless one of them failed first."""
        if self.store.read("failed"):
            return
        if not isinstance(error, UserError | KeyboardInterrupt):
            print(f"posttrain: rank {self.rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
        message = str(error) or type(error).__name__
        told = {"rank": self.rank, "message": message, "exit_code": getattr(error, "exit_code", 1)}
        self.store.write("failed", json.dumps(told))

    def last_error(self, error: BaseException) -> BaseException:
        """The error of this rank, which is sent to the others, or that of the rank that failed first."""
        told_there = ToldElsewhere(str(error), getattr(error, "exit_code", 1))
        try:
            failed_before, ended = bool(self.store.read("failed")), self.store.ended()
            if isinstance(error, KeyboardInterrupt) and (failed_before or ended):
                return self.lost("")  # a starter ends all ranks when one has failed
            self.tell(error)
            self.store.wake_others()
            self.store.write(f"left/{self.rank}", "yes")
        except RuntimeError:  # the store has ended with rank 0, which waits until its message is read if it has one
            return error
        if self.rank and (failed_before or 0 not in {*ended, *self._gone}):
            return told_there
        return error

    def wait_until_read(self) -> None:
        """Before the store ends with this process: until the others have read why, or for a while."""
        until, others = time.monotonic() + TOLD_WITHIN_SECONDS, set(self.store.others)
        with suppress(RuntimeError):
            while others and time.monotonic() < until:
                others -= {*self.store.ended(), *(rank for rank in others if self.store.read(f"left/{rank}"))}
                time.sleep(0.02)

    def require_leader(self) -> None:
        self._require_alive(0)

    def _require_alive(self, rank: int) -> None:
        if self.store.read("failed") or rank in self.store.ended():
            raise self.lost("")
        now, sign = time.monotonic(), self.store.read(f"alive/{rank}")
        before, heard = self._heard[rank]
        if sign != before:
            self._heard[rank] = sign, now
        elif now - heard > self.timeout_seconds:
            self._gone, limit = [rank], f"run.rank_timeout_seconds = {self.timeout_seconds:g}"
            raise RunError(f"rank {rank} gave no sign of life within {limit}.  {CONTINUE}")

    def has_begun(self) -> bool:
        return self.store.has_begun()

    def begins(self) -> None:
        self.store.begins()


@contextmanager
def joined_processes(timeout_seconds: float) -> Iterator[RankProcesses]:
    """Join the group that the environment describes.  A failed rank tells the others, which end as well."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks, ours = RankProcesses(rank, size, timeout_seconds=timeout_seconds), not dist.is_initialized()
    ended, failed = threading.Event(), False
    try:
        if ours:
            start_group(ranks)
        threading.Thread(target=ranks.store.show_life, args=(ended,), daemon=True).start()
        with ranks.naming_peers():
            yield ranks
    except GeneratorExit:  # the caller of `steps` wants no more of them
        ranks.finish(None)
        raise
    except ToldElsewhere:
        with suppress(RuntimeError):
            ranks.store.write(f"left/{rank}", "yes")
        raise
    except BaseException as error:
        failed, ended_with = True, ranks.last_error(error)
        if ended_with is error:
            raise
        raise ended_with from error
    finally:
        ended.set()
        if ours and dist.is_initialized():
            dist.destroy_process_group()  # whose end the others notice
        if failed and holds_store(rank):
            ranks.wait_until_read()


def start_group(ranks: RankProcesses) -> None:
    """Connect the ranks: by gloo, and on GPUs by NCCL."""
    return_freed_tensors()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    began = time.monotonic()
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", ranks.store.attempt),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=ranks.timeout_seconds),
        )
    except RuntimeError as error:
        if time.monotonic() - began >= ranks.timeout_seconds and (absent := ranks.store.not_started()):
            named, limit = " and ".join(f"rank {each}" for each in absent), f"{ranks.timeout_seconds:g}"
            fault = f"{named} did not start within run.rank_timeout_seconds = {limit}"
            raise RunError(f"{fault}.  Read what {named} printed, and start all ranks again.") from error
        said = str(error).strip().splitlines()[0][:300]
        remedy = "Set GLOO_SOCKET_IFNAME to the network interface that their machines share (`ip address` shows it)."
        raise RunError(f"the ranks cannot connect to each other ({said}).  {remedy}") from error


def return_freed_tensors() -> None:
    """Have glibc's malloc give large tensors back to the system when they are freed.

    Otherwise it keeps layers that were gathered, in pieces that fit no other tensor: as much as the whole model.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
