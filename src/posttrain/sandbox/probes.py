"""Small attacks that run before any program: a sandbox that lets one pass is not used.

In a child of the fork-server, each program prints `refused` or `open` for its attempt; limits are tried by running into
them.  In bubblewrap, a container or on another machine, a bait on this machine shows what was reached, and probes also
check what programs there must be able to do.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from posttrain.errors import RunError
from posttrain.sandbox.elsewhere import Backend
from posttrain.sandbox.execution import Execution, Exit, Limits

Passes = Callable[[Execution], bool]
PROBE_LIMITS = Limits(cpu_seconds=0.15, output_bytes=1 << 18)

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
    """How to fix the layer that should have refused it."""
    limits: Limits = PROBE_LIMITS
    verb: Literal["refused", "allowed"] = "refused"


def printed(word: str) -> Passes:
    return lambda execution: execution.succeeded and execution.stdout.split() == [word.encode()]


def stopped_by(*limits: Exit) -> Passes:
    return lambda execution: execution.exit in limits


EAT = "try:\n    x = bytearray(1 << 30)\nexcept MemoryError:\n    print('refused')\nelse:\n    print('open')"
SHOUT = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
FOREVER = "while True: pass"


FILTER = "seccomp filters must be available (kernel >= 3.17 with CONFIG_SECCOMP_FILTER) and allowed to this process"


def escape_attempt(name: str, action: str, remedy: str = FILTER) -> EscapeProbe:
    return EscapeProbe(name, f"{PREAMBLE}\nattempt(lambda: {action})\n", printed("refused"), remedy)


PROBES = (
    escape_attempt("read a file", "open('/proc/self/status').read()"),
    escape_attempt("write a file", "open('/proc/self/oom_score_adj', 'w')"),
    escape_attempt("list a folder", "os.listdir('/')"),
    escape_attempt("ask whether a file exists", "os.stat('/')"),
    escape_attempt("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))"),
    escape_attempt("TCP", "socket.create_connection(('127.0.0.1', 9), 1)"),
    escape_attempt("a Unix socket", "socket.socket(socket.AF_UNIX).bind('\\0posttrain-probe')"),
    escape_attempt("start a process", "os.fork() or os._exit(0)"),
    escape_attempt("run a program", "os.execv('/bin/true', ['true'])"),
    escape_attempt("signal the parent", "os.kill(os.getppid(), 0)"),
    escape_attempt("signal another by its descriptor's owner", "__import__('fcntl').fcntl(0, 8, os.getppid())"),
    escape_attempt(
        "trace the parent", "call({'x86_64': 101, 'aarch64': 117}[os.uname().machine], 0x4206, os.getppid(), 0, 0)"
    ),
    escape_attempt("make a namespace", "call({'x86_64': 272, 'aarch64': 97}[os.uname().machine], 0x10000000)"),
    EscapeProbe(
        "see another environment than its own",
        "import os; print('open' if set(os.environ) - {'PATH', 'LANG', 'MALLOC_ARENA_MAX', 'OMP_NUM_THREADS',"
        " 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'} else 'refused')",
        printed("refused"),
        "the fork-server must be started with an environment from scratch",
    ),
    EscapeProbe("use more memory than its limit", EAT, printed("refused"), "RLIMIT_AS must hold"),
    EscapeProbe("use more time than its limit", FOREVER, stopped_by(Exit.CPU_LIMIT), "process clocks must work"),
    EscapeProbe(
        "print more than its limit", SHOUT, stopped_by(Exit.OUTPUT_LIMIT), "the pool must be able to end its children"
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
        if self.passed:
            return f"{self.probe.verb}   {self.probe.name}"
        seen = (self.execution.stdout + self.execution.stderr).decode("utf-8", "replace").strip()[-300:]
        state = f"{self.execution.exit}, status {self.execution.status}: {seen}"
        wrong = "NOT SAFE" if self.probe.verb == "refused" else "FAILS   "
        return f"{wrong}  {self.probe.name} ({state})  Remedy: {self.probe.remedy}."


class SandboxUnavailable(RunError):
    """This machine cannot run programs safely in the requested way."""


def require_passed(found: Sequence[Finding]) -> None:
    wrong = [finding.line() for finding in found if not finding.passed]
    if wrong:
        shown = "\n  ".join([*wrong, "`posttrain doctor` shows all."])
        raise SandboxUnavailable(f"sandbox: {len(wrong)} of {len(found)} probes failed, so it is not used.\n  {shown}")


LIMITS = Limits(cpu_seconds=1.0, memory_bytes=256 << 20, output_bytes=1 << 18)
LIBC = "__import__('ctypes').CDLL(None)"
CANARY = "POSTTRAIN_PROBE"

ATTEMPT = """
def attempt(action):
    try:
        found = action()
    except Exception as error:
        print("refused")
    else:
        print("open" if found is None or found else "refused")
"""


FORKS = """
import os, time
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
    except OSError:
        print("refused")
        break
else:
    print("open")
"""


class MachineBait:
    """Things on this machine that a program elsewhere must not reach, and whether it did."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.canary = {CANARY: self.secret}
        """For the environment that starts programs; this process's environment is shared by all probes."""
        self.touched: set[str] = set()

    def __enter__(self) -> "MachineBait":
        self.folder = tempfile.TemporaryDirectory(prefix="posttrain-probe-")
        self.path = Path(self.folder.name)
        self.path.chmod(0o777)
        (self.path / "secret").write_text(self.secret)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        for each in (self.tcp, self.udp):
            each.setblocking(False)
        self.victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", self.secret])
        return self

    def __exit__(self, *_: object) -> None:
        """Look at what was touched, and take it away."""
        if set(os.listdir(self.path)) != {"secret"}:
            self.touched.add("file")
        if self.victim.poll() is not None:
            self.touched.add("process")
        for name, receive in (("tcp", self.tcp.accept), ("udp", lambda: self.udp.recv(1))):
            try:
                receive()
                self.touched.add(name)
            except BlockingIOError:
                continue
        self.victim.kill()
        self.victim.wait()
        self.tcp.close()
        self.udp.close()
        self.folder.cleanup()

    def untouched(self, what: str) -> Callable[[Execution], bool]:
        """Whether the program ran and was refused, and nothing on this machine was touched."""
        return lambda execution: printed("refused")(execution) and what not in self.touched


def probes(bait: MachineBait, backend: Backend) -> list[EscapeProbe]:
    """All probes with this bait; attacks on a program's own machine only where that is this one."""
    tried = [*of_bait(bait), *OF_LIMITS, *WORKING]
    if backend.here:
        tried += [of_environment(bait), *OF_A_MACHINE]
    if not backend.bounded_as_a_whole:
        tried += OF_THE_WHOLE
    return [replace(probe, remedy=backend.remedy) for probe in tried]


def of_bait(bait: MachineBait) -> list[EscapeProbe]:
    """Programs that reach for what is on this machine."""
    secret, folder, victim = str(bait.path / "secret"), str(bait.path), bait.victim.pid
    tcp, udp = bait.tcp.getsockname(), bait.udp.getsockname()
    actions = {
        "read a file of this machine": ("", f"open({secret!r}).read() == {bait.secret!r}"),
        "write a file on this machine": ("file", f"open({folder + '/written'!r}, 'w').close() or False"),
        "TCP to this machine": ("tcp", f"__import__('socket').create_connection({tcp!r}, 1) and False"),
        "UDP to this machine": ("udp", f"__import__('socket').socket(2, 2).sendto(b'x', {udp!r}) and False"),
        "see or kill a process of this machine": (
            "process",
            f"{bait.secret!r} in open('/proc/{victim}/cmdline').read() and __import__('os').kill({victim}, 9) is None",
        ),
    }
    return [machine_attempt(name, action, bait.untouched(taken)) for name, (taken, action) in actions.items()]


def of_environment(bait: MachineBait) -> EscapeProbe:
    return machine_attempt(
        "see another environment than its own", f"__import__('os').environ.get({CANARY!r}) == {bait.secret!r}"
    )


def machine_attempt(name: str, action: str, passes: Passes = printed("refused")) -> EscapeProbe:  # noqa: B008  # a function, made once
    return EscapeProbe(name, f"{ATTEMPT}\nattempt(lambda: {action})\n", passes, "", limits=LIMITS)


OF_LIMITS = tuple(
    EscapeProbe(f"{what} than its limit", source, passes, "", limits=LIMITS)
    for what, source, passes in (
        ("use more memory", EAT, lambda ran: printed("refused")(ran) or ran.exit is Exit.SIGNALLED),
        ("use more time", FOREVER, stopped_by(Exit.CPU_LIMIT, Exit.WALL_LIMIT)),
        ("print more", SHOUT, stopped_by(Exit.OUTPUT_LIMIT)),
    )
)
WORKING = tuple(
    replace(machine_attempt(name, action, printed("open")), verb="allowed")
    for name, action in (
        ("write its own file", "open('own', 'w').write('x')"),
        ("start a process", "__import__('subprocess').run(['true'], check=True) and True"),
    )
)
OF_A_MACHINE = (
    machine_attempt("be root", "__import__('os').setuid(0)"),
    # On a new folder, and undone: a backend that contains nothing mounts on the machine itself.
    machine_attempt(
        "mount",
        "__import__('os').makedirs('mounted', exist_ok=True) is None"
        f" and {LIBC}.mount(b'none', b'mounted', b'tmpfs', 0, None) == 0 and {LIBC}.umount(b'mounted') == 0",
    ),
    EscapeProbe("start processes without end", FORKS, printed("refused"), "", limits=LIMITS),
)
OF_THE_WHOLE = (
    machine_attempt("make its own namespace", f"{LIBC}.unshare(0x10000000) == 0"),
    machine_attempt("keep memory in no process", f"{LIBC}.memfd_create(b'x', 0) >= 0"),
)
