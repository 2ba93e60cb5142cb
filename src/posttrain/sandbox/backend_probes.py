"""Probes of a place that is not ours.

What must be refused there, with a bait out here to see whether it was taken; and what must work, since programs are run
there for its sake.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from posttrain.sandbox.backends import Backend
from posttrain.sandbox.execution import Execution, Exit, Limits
from posttrain.sandbox.probes import EscapeProbe, Finding, Passes, said

__all__ = ["Finding", "MachineBait", "probes"]

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
    """Things of this machine that a program elsewhere must not reach, and whether it did."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.canary = {CANARY: self.secret}
        """For the environment from which programs are started; that of this process is one for all who probe."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.look()
        self.victim.kill()
        self.victim.wait()
        self.tcp.close()
        self.udp.close()
        self.folder.cleanup()

    def look(self) -> None:
        """Note what was touched."""
        if set(os.listdir(self.path)) != {"secret"}:
            self.touched.add("file")
        if self.victim.poll() is not None:
            self.touched.add("process")
        for name, receive in (("tcp", self.tcp.accept), ("udp", lambda: self.udp.recv(1))):
            try:
                receive()
            except BlockingIOError:
                continue
            self.touched.add(name)

    def untouched(self, what: str) -> Callable[[Execution], bool]:
        """Whether the program ran and found nothing, and nothing was found out here."""
        return lambda execution: said("refused")(execution) and what not in self.touched


def probes(bait: MachineBait, backend: Backend) -> list[EscapeProbe]:
    """All probes, with this bait; what a program may do to its own machine is tried only where that is this one."""
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
    return [attempt(name, action, bait.untouched(taken)) for name, (taken, action) in actions.items()]


def of_environment(bait: MachineBait) -> EscapeProbe:
    """A program that reads what is in the environment of whoever starts it here."""
    return attempt(
        "see an environment that is not its own", f"__import__('os').environ.get({CANARY!r}) == {bait.secret!r}"
    )


def attempt(name: str, action: str, passes: Passes = said("refused")) -> EscapeProbe:  # noqa: B008  # a function, made once
    """A probe that tries one expression."""
    return EscapeProbe(name, f"{ATTEMPT}\nattempt(lambda: {action})\n", passes, "", limits=LIMITS)


def works(name: str, action: str) -> EscapeProbe:
    """A probe of what must be allowed."""
    return replace(attempt(name, action, said("open")), verb="allowed")


def limit(name: str, source: str, *ends: Exit) -> EscapeProbe:
    """A probe that runs into a limit, in one of these ways."""
    return EscapeProbe(name, source, lambda execution: execution.exit in ends, "", limits=LIMITS)


OF_LIMITS = (
    EscapeProbe(
        "use more memory than its limit",
        "try:\n    x = bytearray(1 << 30)\nexcept MemoryError:\n    print('refused')\nelse:\n    print('open')",
        lambda execution: said("refused")(execution) or execution.exit is Exit.SIGNALLED,
        "",
        limits=LIMITS,
    ),
    limit("use more time than its limit", "while True: pass", Exit.CPU_LIMIT, Exit.WALL_LIMIT),
    limit("print more than its limit", "import sys\nwhile True: sys.stdout.write('x' * 65536)", Exit.OUTPUT_LIMIT),
)
WORKING = (
    works("write a file of its own", "open('own', 'w').write('x')"),
    works("start a process", "__import__('subprocess').run(['true'], check=True) and True"),
)
OF_A_MACHINE = (
    attempt("be root", "__import__('os').setuid(0)"),
    # On a folder of its own, and undone: where a backend keeps nobody in, this is the machine itself.
    attempt(
        "mount",
        "__import__('os').makedirs('mounted', exist_ok=True) is None"
        f" and {LIBC}.mount(b'none', b'mounted', b'tmpfs', 0, None) == 0 and {LIBC}.umount(b'mounted') == 0",
    ),
    EscapeProbe("start processes without end", FORKS, said("refused"), "", limits=LIMITS),
)
OF_THE_WHOLE = (
    attempt("make a namespace of its own", f"{LIBC}.unshare(0x10000000) == 0"),
    attempt("keep memory in no process", f"{LIBC}.memfd_create(b'x', 0) >= 0"),
)
