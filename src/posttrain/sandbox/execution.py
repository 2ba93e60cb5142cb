"""Requests to the sandbox and its answers: limits, processes, executions, conversations.

A Conversation starts processes in a Sandbox; each is a StartedProcess.  Its messages go to `Conversation.message`, its
end to `Conversation.ended`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, Self

_FEW = """
bisect collections copy datetime fractions functools heapq io itertools json math operator random re statistics string
sys time typing
"""
_MORE = """
__future__ _collections_abc _strptime abc argparse array ast asyncio atexit base64 binascii builtins calendar cmath
codecs collections.abc concurrent.futures concurrent.futures.thread contextlib contextvars copyreg csv ctypes
dataclasses decimal difflib dis encodings.ascii encodings.cp1252 encodings.idna encodings.latin_1 encodings.utf_16
encodings.utf_32 encodings.utf_8_sig enum errno fnmatch gc glob graphlib hashlib hmac html importlib inspect keyword
linecache locale logging marshal numbers opcode os pathlib pickle platform pprint queue reprlib resource secrets
select selectors shlex shutil signal socket string struct subprocess tempfile textwrap threading timeit token tokenize
traceback types unicodedata unittest urllib.parse uuid warnings weakref zlib
"""

FEW = tuple(_FEW.split())
"""Modules that are imported before the program, which cannot read any from disk: those of short exercises."""

MANY = tuple(sorted({*FEW, *_MORE.split()}))
"""The default: about a hundred modules of the standard library."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # else every thread reserves 64 MiB of address space, which is limited
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a program."""

Kind = Literal["syntax", "program", "calls", "tests"]
"""A program to compile, to run, or with functions to call; or tests of such functions."""


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
    """Standard error that is kept; the rest is read and dropped, since printing much is not a failure."""
    threads: int = 200
    """More of them at once end the process, where nothing else counts them."""
    most_seconds: float = math.inf
    """By the clock, from start to end, whatever `allow` adds; without waiting for a processor."""

    @property
    def wall_seconds(self) -> float:
        """Seconds by the clock after which a process is ended that sleeps or blocks.

        Waiting for a processor does not count.  A process that waits too long (`PATIENCE` times this limit) is ended as
        `starved`, which is not its fault.
        """
        return min(3 * self.cpu_seconds + 2, self.most_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process to be run."""

    kind: Kind
    source: str
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)


class Exit(StrEnum):
    """How a process ended."""

    FINISHED = "finished"
    """By itself, with an exit status."""
    SIGNALLED = "signalled"
    """By a signal that was not ours: a crash."""
    CPU_LIMIT = "cpu_limit"
    WALL_LIMIT = "wall_limit"
    OUTPUT_LIMIT = "output_limit"
    THREAD_LIMIT = "thread_limit"
    ENDED = "ended"
    """By us, because it was no longer needed."""
    LOST = "lost"
    """The sandbox failed, not the process: says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of a process."""

    exit: Exit
    status: int = 0
    """Exit status, or the number of the signal."""
    stdout: bytes = b""
    stderr: bytes = b""
    cpu_seconds: float = 0.0
    """0 where it is not known, as in a run elsewhere; so are `memory_bytes` and `waited_seconds`."""
    wall_seconds: float = 0.0
    memory_bytes: int = 0
    """Largest resident set, the interpreter's pages (about 30 MiB) included."""
    compiled: bool = False
    """Whether its source could be compiled; reported by the sandbox before any of it ran."""
    most: bool = False
    """The limit by the clock that it passed is `most_seconds`, not that of this run."""
    starved: bool = False
    """It waited too long for a processor, so its end is not its fault."""
    waited_seconds: float = 0.0
    """Time in which it was ready to run and had no processor."""

    @property
    def succeeded(self) -> bool:
        """Whether it exited with status 0; this says nothing about its answer."""
        return self.exit is Exit.FINISHED and self.status == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a fork-server is started."""

    modules: Sequence[str] = tuple(MANY)
    path: Sequence[str] = ()
    """More folders with modules, such as this environment's site-packages for numpy."""
    prepare: str = ""
    """Our source that runs once before any fork, as the module `prepared`."""
    sealed: bool = True
    """False runs programs with limits only: sandbox.kind = none."""


class StartedProcess(Protocol):
    """A requested process."""

    def allow(self, cpu_seconds: float) -> None:
        """Let it use that much more processor time from now on, within its total."""

    def rest(self) -> None:
        """Stop its wall clock while it waits for a message."""

    def send(self, payload: bytes) -> None: ...

    def cpu_seconds(self) -> float:
        """Processor time used so far, where it is known."""

    def waited_seconds(self) -> float:
        """How long it was ready to run without a processor, where it is known."""

    def end(self, why: Exit = Exit.ENDED) -> None:
        """End it; `ended` follows."""


class Conversation(Protocol):
    """One piece of work: the processes that it needs, and what their messages mean."""

    def begin(self, sandbox: "Sandbox") -> None: ...

    def message(self, sandbox: "Sandbox", process: StartedProcess, payload: bytes) -> None: ...

    def ended(self, sandbox: "Sandbox", process: StartedProcess, execution: Execution) -> None: ...


class Sandbox(Protocol):
    """Runs programs that a model wrote; for one thread."""

    @property
    def start_seconds(self) -> float:
        """Time to start a process or send a message, beyond the program's."""

    def start(self, conversation: Conversation, asked: Process) -> StartedProcess: ...

    def converse(self, conversations: Sequence[Conversation]) -> None:
        """Run all conversations in order, as many at once as there is room for."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, processes: Iterable[Process]) -> list[Execution]:
        """Run programs; those that waited too long for a processor run once more, one at a time."""
        singles = [RunConversation(process) for process in processes]
        self.converse(singles)
        for single in singles:
            if single.execution is not None and single.execution.starved:
                self.converse([single])
        return [single.execution for single in singles if single.execution is not None]


class RunConversation:
    """A conversation with a program that is only run."""

    def __init__(self, asked: Process) -> None:
        self.asked = asked
        self.execution: Execution | None = None

    def begin(self, sandbox: Sandbox) -> None:
        sandbox.start(self, self.asked)

    def message(self, sandbox: Sandbox, process: StartedProcess, payload: bytes) -> None:
        """Nothing that it sends counts."""

    def ended(self, sandbox: Sandbox, process: StartedProcess, execution: Execution) -> None:
        self.execution = execution
