"""Sealing a process for good: what it is after `seal` returns, it cannot undo, and nor can what it starts.

Three layers that do not depend on each other.  Resource limits bound what it can use.  Landlock, where the kernel has
it, takes the file system and TCP away.  A seccomp filter leaves it computation and its open descriptors; it comes last,
as sealing itself needs calls that it refuses.
"""

import ctypes
import os
import platform
import resource
import signal
from dataclasses import dataclass

from filter import Filter

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
"""The same numbers on every machine."""

FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
"""LANDLOCK_ACCESS_FS_* by version of the interface, all that it knows; 5 stands for later ones."""
TCP_RIGHTS, SCOPES = 0x3, 0x3
"""Binding and connecting, from version 4; abstract sockets and signals, from version 6."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_seconds: int
    """Whole seconds, after which the kernel ends it; the pool ends it sooner and more exactly."""
    memory_bytes: int
    """Address space beyond what the interpreter has when it is forked."""
    file_bytes: int = 0
    """Largest file that it could write, if it could write one."""
    descriptors: int = 64


class Sealing:
    """What can be made before a process is forked: the filter and the Landlock ruleset's parameters."""

    def __init__(self) -> None:
        self.filter = Filter(platform.machine())
        self.landlock = landlock_version()
        with open("/proc/self/statm", encoding="ascii") as file:
            self.own_bytes = int(file.read().split()[0]) * resource.getpagesize()

    def bound(self, limits: Limits, parent: int) -> None:
        """Limits and nothing else, where somebody has asked for no sandbox."""
        die_with(parent)
        limit(limits, self.own_bytes)

    def seal(self, limits: Limits, parent: int, uid: int | None) -> None:
        """Seal this process.  Raises OSError where a layer cannot be put on; Landlock may be missing altogether."""
        die_with(parent)
        limit(limits, self.own_bytes)
        if uid is not None:
            become(uid)
            die_with(parent)  # forgotten when the user changed
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_DUMPABLE, 0)
        if self.landlock:
            leave_file_system(self.landlock)
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self.filter.for_process(os.getpid()))


def prctl(option: int, *arguments: object) -> None:
    """The system call, or OSError."""
    padded = [*arguments, *[0] * (4 - len(arguments))]
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in padded]
    if libc.prctl(option, *values) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def die_with(parent: int) -> None:
    """Be killed when the parent ends, also where it has ended already."""
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def limit(limits: Limits, own_bytes: int) -> None:
    """Resource limits, each at most what is allowed here; the first four must hold."""
    lower(resource.RLIMIT_CPU, limits.cpu_seconds)
    lower(resource.RLIMIT_AS, own_bytes + limits.memory_bytes)
    lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    lower(resource.RLIMIT_NOFILE, limits.descriptors)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK):
        try:
            resource.setrlimit(kind, (0, 0))
        except (OSError, ValueError):  # refused inside some virtual machines; nothing that is left open needs them
            continue


def lower(kind: int, wanted: int) -> None:
    """Set one limit, soft and hard."""
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, value))


def become(uid: int) -> None:
    """Give up root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def landlock_version() -> int:
    """Version of the kernel's Landlock interface; 0 where it has none."""
    found: int = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    return max(0, found)


def leave_file_system(version: int) -> None:
    """Handle every right that this Landlock knows, and allow none."""
    ruleset = Ruleset(
        files=FILE_RIGHTS[min(version, 5)],
        network=TCP_RIGHTS if version >= 4 else 0,
        scoped=SCOPES if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    if libc.syscall(LANDLOCK_RESTRICT_SELF, ctypes.c_int(rules), 0) != 0:
        raise OSError(ctypes.get_errno(), f"landlock_restrict_self: {os.strerror(ctypes.get_errno())}")
    os.close(rules)
