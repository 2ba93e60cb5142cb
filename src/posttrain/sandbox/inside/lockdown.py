"""Seals a process: after `seal`, neither it nor its children can undo it.

Independent layers.  Resource limits bound its use of the machine.  Root is given up, and no privilege can be gained.
Landlock, where the kernel has it, takes the file system and TCP away.  A seccomp filter leaves computation and the open
descriptors; it comes last, as sealing itself needs calls that it refuses.  The server puts the layers that all children
share on itself, once and before it forks any (`confine`): a child inherits them.

A sealed program cannot learn where this project is or what the machine is called, but can learn how long its input is
(`be_nowhere`).
"""

import ctypes
import os
import platform
import posix
import resource
import signal
import struct
import sys

from filter import NUMBERS, Filter

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
"""The same numbers on every machine."""

FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
"""All LANDLOCK_ACCESS_FS_* of each version of the interface; 5 is for later ones too."""
TCP_RIGHTS, SCOPES = 0x3, 0x3
"""Binding and connecting, from version 4; abstract sockets and signals, from version 6."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
quick_prctl = ctypes.PyDLL(None).prctl
quick_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


class Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


FILE_BYTES, UNSEALED_FILE_BYTES = 0, 1 << 24
"""Largest file that a program could write, if it could write one."""
DESCRIPTORS = 64


class Seal:
    """Prepared before a process is forked: the filter and the Landlock ruleset's parameters."""

    def __init__(self, *, sealed: bool) -> None:
        self.sealed = sealed
        self.filter = Filter(platform.machine())
        self.landlock: int = max(0, libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
        """Version of the kernel's Landlock interface; 0 if it has none."""
        self.parent = os.getpid()
        with open("/proc/self/statm", encoding="ascii") as file:
            self.own_bytes = int(file.read().split()[0]) * resource.getpagesize()
        self.hardest = {kind: resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)}

    def confine(self, uid: int | None) -> None:
        """Put on this process, the server, the layers that all of its children share.

        Raises OSError if a layer cannot be put on; Landlock may be missing altogether.
        """
        lower(resource.RLIMIT_FSIZE, FILE_BYTES if self.sealed else UNSEALED_FILE_BYTES)
        lower(resource.RLIMIT_NOFILE, DESCRIPTORS)
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_MEMLOCK):
            try:
                resource.setrlimit(kind, (0, 0))
            except (OSError, ValueError):  # refused inside some virtual machines; nothing that is left open needs them
                continue
        if not self.sealed:  # the user asked for no sandbox: only limits
            return
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_DUMPABLE, 0)  # so that one child cannot trace another, nor this process
        if self.landlock:
            leave_file_system(self.landlock)

    def within(self, kind: int, wanted: int) -> int:
        hard = self.hardest[kind]
        return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)

    def seal(self, cpu_seconds: int, memory_bytes: int) -> None:
        """Seal this process, a child of the confined server: it may only compute, within these limits.

        `cpu_seconds` are whole ones, after which the kernel ends it; the pool ends it sooner and more exactly.
        `memory_bytes` is address space beyond what the interpreter has when it is forked.
        """
        call_prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0)
        if os.getppid() != self.parent:
            os._exit(1)
        cpu_seconds = self.within(resource.RLIMIT_CPU, cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        memory_bytes = self.within(resource.RLIMIT_AS, self.own_bytes + memory_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        if self.sealed:
            call_prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self.filter.for_process(os.getpid()))


def call_prctl(option: int, value: int, address: int) -> None:
    """The system call, touching as little as possible of the memory that is shared with the server."""
    if quick_prctl(option, value, address, 0, 0) != 0:
        prctl(option, value, address)  # again, for the reason


def prctl(option: int, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, *[0] * (4 - len(arguments)))]
    if libc.prctl(option, *values) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def lower(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (value, value))


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


HOST_NAME = "sandbox"
EXECUTABLE = "/usr/bin/python3"
STAT = {"x86_64": struct.Struct("QQQIII4xQqqq6Q24x"), "aarch64": struct.Struct("QQIIIIQ8xqi4xq6Q8x")}
"""`struct stat`: 144 and 128 bytes."""


def be_nowhere(machine: str) -> None:
    """Hide the paths of the interpreter and this project, and the machine's name; nothing is read from disk anyway."""
    sys.orig_argv[:] = ["python3", *sys.argv]
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.executable = sys._base_executable = EXECUTABLE  # type: ignore[attr-defined]  # it is there
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        setattr(sys, name, "/usr")
    seen = os.uname_result(("Linux", HOST_NAME, os.uname().release, "", machine))
    vars(platform)["_uname_cache"] = None  # of the machine itself
    size = Fstat(machine)
    for module in (os, posix):
        vars(module)["uname"] = lambda: seen
        vars(module)["fstat"] = size
    if "socket" in sys.modules:
        vars(sys.modules["socket"])["gethostname"] = lambda: HOST_NAME


class Fstat:
    """`os.fstat` by the call of that name: some C libraries make it by one that takes paths too, and is refused."""

    def __init__(self, machine: str) -> None:
        self.number, self.layout = NUMBERS[machine]["fstat"], STAT[machine]
        self.in_order = machine == "aarch64"
        self.libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self, fd: int) -> os.stat_result:
        buffer = ctypes.create_string_buffer(self.layout.size)
        if self.libc.syscall(ctypes.c_long(self.number), ctypes.c_int(fd), buffer) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        device, inode, first, second, uid, gid, rdev, size, block, blocks, *times = self.layout.unpack(buffer)
        mode, links = (first, second) if self.in_order else (second, first)
        nanoseconds = [seconds * 10**9 + rest for seconds, rest in zip(times[::2], times[1::2], strict=True)]
        plain = (mode, inode, device, links, uid, gid, size, *times[::2])
        names = ("st_atime", "st_mtime", "st_ctime")
        more = {name: value / 10**9 for name, value in zip(names, nanoseconds, strict=True)}
        more |= {f"{name}_ns": value for name, value in zip(names, nanoseconds, strict=True)}
        return os.stat_result(plain, {**more, "st_blksize": block, "st_blocks": blocks, "st_rdev": rdev})
