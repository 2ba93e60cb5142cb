"""How long programs waited for a processor, so that a busy machine does not use up their time limits.

A limit by the clock is for programs that sleep or block.  A program that is ready to run and has no processor is not at
fault, so its waiting time does not count.  The kernel knows this time for each thread (`schedstat`); without it, the
machine's pressure is used instead: the time in which anything on it waited for a processor.
"""

import os
import time
from pathlib import Path

PATIENCE = 5.0
"""A limit by the clock is at most this many times as long, however busy the machine is."""


def thread_waits(pid: int) -> dict[str, float] | None:
    """Seconds that each living thread of a process has waited; None where this cannot be read."""
    try:
        return {thread: waited_by(f"{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")}
    except (OSError, IndexError, ValueError):
        return None


def waited_by(thread: str) -> float:
    with open(f"/proc/{thread}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9  # nanoseconds that it ran and waited, and how many times


def waited_here() -> float:
    """Seconds that this thread of ours has waited; 0 where the kernel does not count them."""
    try:
        return waited_by("thread-self")
    except (OSError, IndexError, ValueError):
        return 0.0


class MachineWaits:
    """Seconds since its making in which anything on this machine waited for a processor."""

    def __init__(self) -> None:
        self.began, self.before = time.monotonic(), pressure_seconds()

    def seconds(self) -> float:
        """So far.  Without the kernel's count: all of them where the machine is overloaded, else none."""
        now = pressure_seconds()
        if now is None or self.before is None:
            return time.monotonic() - self.began if overloaded() else 0.0
        return now - self.before


def pressure_seconds() -> float | None:
    try:
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, IndexError, ValueError):
        return None


def overloaded() -> bool:
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)


class ProcessWaits:
    """How long one process has waited; looked at while it runs, since the count ends with it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.total = 0.0
        self.of_threads: dict[str, float] = {}
        self.machine = MachineWaits()

    def look(self, pid: int | None, now: float) -> None:
        """Add what has come since the last look: the longest wait of any thread.

        A program's own threads wait for each other, but together no longer than they compute, and that is limited.
        Before it has a process all of its time is waiting.
        """
        if pid is None:
            self.total = now - self.began
            return
        waits = thread_waits(pid)
        if waits is None:  # it has ended, or the kernel does not count
            if not self.of_threads:
                self.total = max(self.total, self.machine.seconds())
            return
        grown = max((waited - self.of_threads.get(thread, 0.0) for thread, waited in waits.items()), default=0.0)
        self.of_threads = waits
        self.total = min(self.total + max(0.0, grown), now - self.began)
