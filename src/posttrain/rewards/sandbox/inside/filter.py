"""The seccomp filter: a small program in classic BPF that the kernel runs before every system call of a process.

Written for `struct seccomp_data`: the call's number at byte 0, the architecture at 4, argument i at 16 + 8 i, its low
half first (both machines that we know are little-endian).  What is not named is refused with EPERM.
"""

import ctypes
import errno
from collections.abc import Sequence

from syscalls import ALLOWED, ARCHITECTURES, NUMBERS

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32_BIT = 0x40000000

CLONE_THREAD, NAMESPACES = 0x00010000, 0x7E020080
AF_UNIX = 1
TERMINAL_QUERIES = (0x5401, 0x5421, 0x5451, 0x541B)
"""TCGETS, FIONBIO, FIOCLEX, FIONREAD."""
DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; F_SETOWN could signal other processes."""


class Instruction(ctypes.Structure):
    """`struct sock_filter`."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction)))


Step = tuple[int, int, int, int]
OWN_PID = -1
"""Stands for the process's own id until `Filter.for_process` writes it in."""


class Filter:
    """The assembled filter of this machine, patched with a process id and installed as it is."""

    def __init__(self, machine: str) -> None:
        steps = assembled(machine)
        self._own = [index for index, step in enumerate(steps) if step[3] == OWN_PID]
        self._steps = (Instruction * len(steps))(*[Instruction(*step[:3], step[3] & 0xFFFFFFFF) for step in steps])
        self._program = Program(len(steps), self._steps)

    def for_process(self, pid: int) -> "ctypes._CArgObject":
        """The filter for one process, as `prctl` takes it."""
        for index in self._own:
            self._steps[index].k = pid
        return ctypes.byref(self._program)


def assembled(machine: str) -> list[Step]:
    """All instructions."""
    numbers = NUMBERS[machine]
    steps: list[Step] = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    steps.append((LOAD, 0, 0, 0))
    if machine == "x86_64":
        steps += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for name in ALLOWED:
        if name in numbers:
            steps += [(JUMP_EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, ALLOW)]
    for name, checks in conditions().items():
        if name in numbers:
            steps += [(JUMP_EQUAL, 0, len(checks), numbers[name]), *checks]
    # Without clone3 the C library makes threads with clone, whose flags can be seen.
    steps += [(JUMP_EQUAL, 0, 1, numbers["clone3"]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    steps.append((RETURN, 0, 0, REFUSE | errno.EPERM))
    return steps


def conditions() -> dict[str, list[Step]]:
    """Calls that depend on their arguments."""
    return {
        "ioctl": one_of(1, TERMINAL_QUERIES),
        "fcntl": one_of(1, DESCRIPTOR_COMMANDS),
        "kill": one_of(0, [OWN_PID]),
        "tgkill": one_of(0, [OWN_PID]),
        "socketpair": one_of(0, [AF_UNIX]),
        "sendto": null_pointer(4),
        # Of a process itself, and read only.
        "prlimit64": [*passing_if_zero(low(0)), *null_pointer(2)],
        "clone": [
            (LOAD, 0, 0, low(0)),
            (JUMP_BITS, 1, 0, NAMESPACES),
            (JUMP_BITS, 1, 0, CLONE_THREAD),
            (RETURN, 0, 0, REFUSE | errno.EPERM),
            (RETURN, 0, 0, ALLOW),
        ],
    }


def low(argument: int) -> int:
    """Where the low half of an argument lies."""
    return 16 + 8 * argument


def one_of(argument: int, values: Sequence[int]) -> list[Step]:
    """Allow where an argument, as a 32-bit number, is one of these."""
    compare = [(JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [(LOAD, 0, 0, low(argument)), *compare, (RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)]


def passing_if_zero(offset: int) -> list[Step]:
    """Go on where four bytes are zero, else refuse."""
    return [(LOAD, 0, 0, offset), (JUMP_EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE | errno.EPERM)]


def null_pointer(argument: int) -> list[Step]:
    """Allow where an argument is a null pointer."""
    return [*passing_if_zero(low(argument)), *passing_if_zero(low(argument) + 4), (RETURN, 0, 0, ALLOW)]
