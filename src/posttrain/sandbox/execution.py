"""What is asked of the sandbox, and what it answers: limits, processes, executions, conversations.

A Conversation starts processes in a Sandbox, and each is a StartedProcess.  A process's message goes to
`Conversation.message`, its end to `Conversation.ended`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

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
"""Modules that programs find imported already, since they cannot read any from disk: what short exercises import."""

MANY = tuple(sorted({*FEW, *_MORE.split()}))
"""The default: about a hundred modules of the standard library."""

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
    """Standard error that is kept; the rest is read and dropped, since printing much is not a failure."""
    threads: int = 200
    """More of them at once end the process, where nothing else counts them."""
    most_seconds: float = math.inf
    """By the clock, from its start to its end, whatever it is allowed later; without waiting for a processor."""

    @property
    def wall_seconds(self) -> float:
        """After how long by the clock a process is ended that sleeps or blocks.

        Waiting for a processor does not count.  A process that waits beyond all patience (`PATIENCE` times this limit)
        is ended as `starved`, which is not its fault.
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
    """By us, as it was not needed any longer."""
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
    most: bool = False
    """The limit by the clock that it passed is `most_seconds`, not that of this run."""
    starved: bool = False
    """It waited too long for a processor, so its end is not its fault."""
    waited_seconds: float = 0.0
    """Time in which it was ready to run and had no processor."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with status 0; this says nothing about what it computed."""
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


class StartedProcess(Protocol):
    """A process that has been asked for."""

    def allow(self, cpu_seconds: float) -> None:
        """Let it use that much more processor time from now on, within its total."""
        ...

    def rest(self) -> None:
        """It waits for a message, so its wall clock stops."""
        ...

    def send(self, payload: bytes) -> None: ...

    def cpu_seconds(self) -> float:
        """Processor time used so far, where it is known."""
        ...

    def waited_seconds(self) -> float:
        """How long it was ready to run without a processor, where it is known."""
        ...

    def end(self, why: Exit = Exit.ENDED) -> None:
        """End it; `ended` follows."""
        ...


class Conversation(Protocol):
    """One piece of work: the processes that it needs, and what their messages mean."""

    def begin(self, sandbox: "Sandbox") -> None: ...

    def message(self, sandbox: "Sandbox", process: StartedProcess, payload: bytes) -> None: ...

    def ended(self, sandbox: "Sandbox", process: StartedProcess, execution: Execution) -> None: ...


class Sandbox(Protocol):
    """Runs programs that a model wrote; for one thread."""

    @property
    def start_seconds(self) -> float:
        """What starting a process, or telling it something, may take beyond the program's own time."""
        ...

    def start(self, conversation: Conversation, asked: Process) -> StartedProcess: ...

    def converse(self, conversations: Sequence[Conversation]) -> None:
        """Run all conversations in order, as many at once as there is room for."""
        ...

    def close(self) -> None: ...


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


def run_all(sandbox: Sandbox, processes: Iterable[Process]) -> list[Execution]:
    """Run programs; those that waited too long for a processor run once more, one at a time."""
    singles = [RunConversation(process) for process in processes]
    sandbox.converse(singles)
    for single in singles:
        if single.execution is not None and single.execution.starved:
            sandbox.converse([single])
    return [single.execution for single in singles if single.execution is not None]
