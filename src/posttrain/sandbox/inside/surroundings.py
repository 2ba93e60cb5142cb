"""What a sealed program finds around it: neutral values where it need not know, and a way to what it may.

Where this project lies and what the machine is called is no business of a program; how long its input is, is.  Put in
place once, before anything is forked.
"""

import ctypes
import os
import platform
import posix
import struct
import sys

from syscalls import NUMBERS

HOST_NAME = "sandbox"
EXECUTABLE = "/usr/bin/python3"
STAT = {
    "x86_64": struct.Struct("QQQIII4xQqqq6Q24x"),
    "aarch64": struct.Struct("QQIIIIQ8xqi4xq6Q8x"),
}
"""`struct stat`: 144 and 128 bytes."""


def be_nowhere(machine: str) -> None:
    """Hide where the interpreter and this project are, and the machine's name; nothing is read from disk anyway."""
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
