"""Small attacks of our own, run in a real child before anything else is: a sandbox that lets one pass is not used.

Each program prints `refused` where what it tries is refused, and `open` where it is not; a limit is tried by running
into it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.errors import RunError
from posttrain.sandbox.execution import Execution, Exit, Limits, Process

Passes = Callable[[Execution], bool]
PROBE_LIMITS = Limits(cpu_seconds=0.15, output_bytes=1 << 18)

SPIN_SECONDS = 0.5
"""Processor time of the program that tells whether the service is busy."""
SPIN = f"""
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() < used + {SPIN_SECONDS}: pass
print(time.monotonic() - began)
"""
PREAMBLE = """
import ctypes, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        action()
    except OSError:
        print("refused")
    else:
        print("open")
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""


@dataclass(frozen=True, slots=True)
class EscapeProbe:
    """Something that a program must not be able to do, or must be."""

    name: str
    source: str
    passes: Passes
    remedy: str
    """What the layer that should have refused needs."""
    limits: Limits = PROBE_LIMITS
    verb: Literal["refused", "allowed"] = "refused"
    """What is to become of it."""


def said(word: str) -> Passes:
    """It came to its end and said so."""
    return lambda execution: execution.succeeded and execution.stdout.split() == [word.encode()]


def stopped_by(limit: Exit) -> Passes:
    """It ran into this limit."""
    return lambda execution: execution.exit is limit


FILTER = "seccomp filters must be available (kernel >= 3.17 with CONFIG_SECCOMP_FILTER) and allowed to this process"


def attempt(name: str, action: str, remedy: str = FILTER) -> EscapeProbe:
    """A probe that tries one expression."""
    return EscapeProbe(name, f"{PREAMBLE}\nattempt(lambda: {action})\n", said("refused"), remedy)


PROBES = (
    attempt("read a file", "open('/proc/self/status').read()"),
    attempt("write a file", "open('/proc/self/oom_score_adj', 'w')"),
    attempt("list a folder", "os.listdir('/')"),
    attempt("ask whether a file exists", "os.stat('/')"),
    attempt("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"),
    attempt("TCP", "socket.create_connection(('127.0.0.1', 9), 1)"),
    attempt("a Unix socket", "socket.socket(socket.AF_UNIX).bind('\\0posttrain-probe')"),
    attempt("start a process", "os.fork() or os._exit(0)"),
    attempt("run a program", "os.execv('/bin/true', ['true'])"),
    attempt("signal the parent", "os.kill(os.getppid(), 0)"),
    attempt("signal another by its descriptor's owner", "__import__('fcntl').fcntl(0, 8, os.getppid())"),
    attempt(
        "trace the parent", "call({'x86_64': 101, 'aarch64': 117}[os.uname().machine], 0x4206, os.getppid(), 0, 0)"
    ),
    attempt("make a namespace", "call({'x86_64': 272, 'aarch64': 97}[os.uname().machine], 0x10000000)"),
    EscapeProbe(
        "see an environment that is not its own",
        "import os; print('open' if set(os.environ) - {'PATH', 'LANG', 'MALLOC_ARENA_MAX', 'OMP_NUM_THREADS',"
        " 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'} else 'refused')",
        said("refused"),
        "the fork-server must be started with an environment from scratch",
    ),
    EscapeProbe(
        "use more memory than its limit",
        "try:\n    x = bytearray(1 << 30)\nexcept MemoryError:\n    print('refused')\nelse:\n    print('open')",
        said("refused"),
        "RLIMIT_AS must hold",
    ),
    EscapeProbe(
        "use more time than its limit", "while True: pass", stopped_by(Exit.CPU_LIMIT), "process clocks must work"
    ),
    EscapeProbe(
        "print more than its limit",
        "import sys\nwhile True: sys.stdout.write('x' * 65536)",
        stopped_by(Exit.OUTPUT_LIMIT),
        "the pool must be able to end its children",
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found."""

    probe: EscapeProbe
    execution: Execution

    @property
    def passed(self) -> bool:
        return self.probe.passes(self.execution)

    def line(self) -> str:
        """One line of the table that `posttrain doctor` prints."""
        if self.passed:
            return f"{self.probe.verb}   {self.probe.name}"
        seen = (self.execution.stdout + self.execution.stderr).decode("utf-8", "replace").strip()[-300:]
        state = f"{self.execution.exit}, status {self.execution.status}: {seen}"
        wrong = "NOT SAFE" if self.probe.verb == "refused" else "FAILS   "
        return f"{wrong}  {self.probe.name} ({state})  Remedy: {self.probe.remedy}."


class SandboxUnavailable(RunError):
    """This machine cannot run programs safely in the way that was asked for."""


def processes() -> list[Process]:
    """The probes as processes."""
    return [Process(kind="program", source=probe.source, limits=probe.limits) for probe in PROBES]


def findings(executions: Sequence[Execution]) -> list[Finding]:
    """What each probe found."""
    return [Finding(probe, execution) for probe, execution in zip(PROBES, executions, strict=True)]


def require_passed(found: Sequence[Finding]) -> None:
    """Raise SandboxUnavailable where a probe was let through."""
    wrong = [finding.line() for finding in found if not finding.passed]
    if wrong:
        raise SandboxUnavailable(
            f"sandbox: {len(wrong)} of {len(found)} probes did not pass, so no program will be run there.\n  "
            + "\n  ".join(wrong)
            + "\n  `posttrain doctor` shows all."
        )
