"""What is asked of the sandbox, and what it says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from posttrain.sandbox.modules import MANY

Kind = Literal["syntax", "program", "calls", "tests"]
"""A program that is only compiled, one that is run, one whose functions are called, or tests of such functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one process may use."""

    cpu_seconds: float = 2.0
    """Processor time: the same on a busy machine, which a wall clock is not."""
    memory_bytes: int = 512 << 20
    """Address space beyond the interpreter's own."""
    output_bytes: int = 1 << 20
    """Standard output; more ends the process."""
    error_bytes: int = 1 << 16
    """Standard error that is kept; the rest is read and dropped, since printing it is no failure."""
    threads: int = 200
    """More of them at once end the process, where nothing else counts them."""
    most_seconds: float = math.inf
    """By the clock, from its start to its end, whatever it is allowed later."""

    @property
    def wall_seconds(self) -> float:
        """When a process is given up that neither ends nor computes."""
        return min(3 * self.cpu_seconds + 2, self.most_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process to be run."""

    kind: Kind
    source: str
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)


class Exit(StrEnum):
    """How a process came to its end."""

    FINISHED = "finished"
    """By itself, with an exit status."""
    SIGNALLED = "signalled"
    """By a signal that was not ours: a crash."""
    CPU_LIMIT = "cpu_limit"
    WALL_LIMIT = "wall_limit"
    OUTPUT_LIMIT = "output_limit"
    THREAD_LIMIT = "thread_limit"
    ENDED = "ended"
    """By us, as nobody needed it any longer."""
    LOST = "lost"
    """The sandbox failed, not the process: says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What became of a process."""

    exit: Exit
    status: int
    """Exit status, or the number of the signal."""
    stdout: bytes
    stderr: bytes
    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    """Largest resident set, the interpreter's pages (about 30 MiB) included."""
    compiled: bool
    """Whether its source could be compiled; said by the sandbox before any of it ran."""
    starved: bool = False
    """At the wall limit: it was waiting for a processor rather than idle, so the limit says nothing about it."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with status 0; about what it computed that says nothing."""
        return self.exit is Exit.FINISHED and self.status == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a fork-server is started."""

    modules: Sequence[str] = tuple(MANY)
    path: Sequence[str] = ()
    """Folders in which more modules are looked for, such as this environment's site-packages for numpy."""
    prepare: str = ""
    """Source of ours that is run once before anything is forked, as the module `prepared`."""
    sealed: bool = True
    """False runs programs with limits and nothing else: only where somebody asked for that and said so twice."""
