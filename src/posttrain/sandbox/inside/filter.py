"""The seccomp filter: a small program in classic BPF that the kernel runs before every system call of a process.

Written for `struct seccomp_data`: the call's number at byte 0, the architecture at 4, argument i at 16 + 8 i, its low
half first (both known machines are little-endian).  Calls that are not listed are refused with EPERM.
"""

import ctypes
import errno
from collections.abc import Sequence

_ALLOWED = """
mmap munmap mremap mprotect madvise brk membarrier
read write readv writev pread64 pwrite64 lseek close close_range fstat fsync dup dup2 dup3 pipe pipe2
poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2
shutdown getsockname getpeername
nanosleep gettimeofday time times alarm getitimer setitimer
futex set_robust_list set_tid_address rseq sched_yield getcpu gettid
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall exit exit_group
getpid getppid getpgrp getuid geteuid getgid getegid sysinfo getrusage getrlimit getrandom
"""
"""Memory, open files, time, its own threads and signals, its identity.  `Filter` has the calls that depend on their
arguments."""

ALLOWED = tuple(_ALLOWED.split())
"""No path, no socket, no process, no name of the machine: nothing that names something outside."""

_NUMBERS = {
    "x86_64": """
read 0 write 1 close 3 fstat 5 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 rt_sigaction 13 rt_sigprocmask 14
rt_sigreturn 15 ioctl 16 pread64 17 pwrite64 18 readv 19 writev 20 pipe 22 select 23 sched_yield 24 mremap 25
madvise 28 dup 32 dup2 33 nanosleep 35 getitimer 36 alarm 37 setitimer 38 getpid 39 sendto 44 recvfrom 45 shutdown 48
getsockname 51 getpeername 52 socketpair 53 setsockopt 54 getsockopt 55 clone 56 exit 60 kill 62 uname 63 fcntl 72
fsync 74 gettimeofday 96 getrlimit 97 getrusage 98 sysinfo 99 times 100 getuid 102 getgid 104 geteuid 107 getegid 108
getppid 110 getpgrp 111 getpgid 121 getsid 124 sigaltstack 131 gettid 186 time 201 futex 202 sched_getaffinity 204
set_tid_address 218 restart_syscall 219 clock_gettime 228 clock_getres 229 clock_nanosleep 230 exit_group 231
epoll_wait 232 epoll_ctl 233 tgkill 234 pselect6 270 ppoll 271 set_robust_list 273 get_robust_list 274 epoll_pwait 281
eventfd2 290 epoll_create1 291 dup3 292 pipe2 293 prlimit64 302 getcpu 309 getrandom 318 membarrier 324 rseq 334
clone3 435 close_range 436
""",
    "aarch64": """
eventfd2 19 epoll_create1 20 epoll_ctl 21 epoll_pwait 22 dup 23 dup3 24 fcntl 25 ioctl 29 close 57 pipe2 59 lseek 62
read 63 write 64 readv 65 writev 66 pread64 67 pwrite64 68 pselect6 72 ppoll 73 fstat 80 fsync 82 exit 93
exit_group 94 set_tid_address 96 futex 98 set_robust_list 99 get_robust_list 100 nanosleep 101 getitimer 102
setitimer 103 clock_gettime 113 clock_getres 114 clock_nanosleep 115 sched_getaffinity 123 sched_yield 124
restart_syscall 128 kill 129 tgkill 131 sigaltstack 132 rt_sigaction 134 rt_sigprocmask 135 rt_sigreturn 139 times 153
getpgid 155 getsid 156 uname 160 getrlimit 163 getrusage 165 getcpu 168 gettimeofday 169 getpid 172 getppid 173
getuid 174 geteuid 175 getgid 176 getegid 177 gettid 178 sysinfo 179 socketpair 199 getsockname 204 getpeername 205
sendto 206 recvfrom 207 setsockopt 208 getsockopt 209 shutdown 210 brk 214 munmap 215 mremap 216 clone 220 mmap 222
mprotect 226 madvise 233 prlimit64 261 getrandom 278 membarrier 283 rseq 293 clone3 435 close_range 436
""",
}
"""Names and numbers of calls, in the order of the numbers."""
NUMBERS = {
    machine: dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for machine, words in ((machine, text.split()) for machine, text in _NUMBERS.items())
}
"""A name that is missing does not exist on that machine."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h."""

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
X32_BIT = 0x40000000

CLONE_THREAD, NAMESPACES = 0x00010000, 0x7E020080
AF_UNIX = 1
TERMINAL_QUERIES = (0x5401, 0x5421, 0x5451, 0x541B)
"""TCGETS, FIONBIO, FIOCLEX, FIONREAD."""
DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; F_SETOWN could signal other processes."""
SET_FLAGS, REFUSED_FLAGS = 4, 0x16000
"""F_SETFL; O_ASYNC, and O_DIRECT of both machines, under which every write to a pipe has to be read by itself."""
SOCKET_OPTIONS = (3, 4, 7, 8, 30, 38, 39)
"""SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_ACCEPTCONN, SO_PROTOCOL, SO_DOMAIN; none that names the peer."""
SENDING_FLAGS, RECEIVING_FLAGS = 0x40 | 0x4000, 0x2 | 0x40 | 0x100
"""MSG_DONTWAIT, MSG_NOSIGNAL; MSG_PEEK, MSG_DONTWAIT, MSG_WAITALL.  MSG_OOB above all is not allowed."""
NUM_CLOCKS, THREAD_CLOCK, OWN_CLOCK = 16, 4, -6
"""The clocks that have a number; the bit of a thread's, which the kernel gives to its own process alone; one's own."""


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
        steps = filter_program(machine)
        self._own = [index for index, step in enumerate(steps) if step[3] == OWN_PID]
        self._steps = (Instruction * len(steps))(*[Instruction(*step[:3], step[3] & 0xFFFFFFFF) for step in steps])
        self._program = Program(len(steps), self._steps)

        self._address = ctypes.addressof(self._program)

    def for_process(self, pid: int) -> int:
        """Address of the filter for one process."""
        for index in self._own:
            self._steps[index].k = pid
        return self._address


def filter_program(machine: str) -> list[Step]:
    """All instructions.

    Calls are found by binary search: the kernel walks the filter for every number each time that it is installed.
    """
    numbers = NUMBERS[machine]
    checks = {name: steps for name, steps in conditions().items() if name in numbers}
    written = {tuple(steps): f"check {name}" for name, steps in checks.items()}  # once, for all that share it
    verdicts = {numbers[name]: "allow" for name in ALLOWED if name in numbers}
    verdicts |= {numbers[name]: written[tuple(steps)] for name, steps in checks.items()}
    verdicts[numbers["clone3"]] = "absent"  # without it the C library makes threads with clone, whose flags can be seen
    code = Code()
    code.add("", (LOAD, 0, 0, 4))
    code.add("", JUMP_EQUAL, ARCHITECTURES[machine], "number", "kill")
    code.add("number", (LOAD, 0, 0, 0))
    binary_search(code, "search", runs(verdicts, X32_BIT if machine == "x86_64" else None))
    for steps, label in written.items():
        for index, step in enumerate(steps):
            code.add(label if index == 0 else "", step)
    code.add("kill", (RETURN, 0, 0, KILL))
    code.add("allow", (RETURN, 0, 0, ALLOW))
    code.add("absent", (RETURN, 0, 0, REFUSE | errno.ENOSYS))
    code.add("refuse", (RETURN, 0, 0, REFUSE | errno.EPERM))
    return code.steps()


Run = tuple[int, str]
"""From this number on, up to the next run's, the verdict is this label."""


def runs(verdicts: dict[int, str], absent_from: int | None) -> list[Run]:
    """All numbers, in runs of the same verdict; calls that are not listed are refused."""
    last = max(verdicts) + 1
    named = [(number, verdicts.get(number, "refuse")) for number in range(last + 1)]
    if absent_from is not None:
        named.append((absent_from, "absent"))
    return [run for index, run in enumerate(named) if index == 0 or run[1] != named[index - 1][1]]


def binary_search(code: "Code", label: str, among: list[Run]) -> None:
    """Instructions that go to the label of the run that the number lies in."""
    middle = len(among) // 2
    sides = []
    for side, part in (("l", among[:middle]), ("r", among[middle:])):
        sides.append(part[0][1] if len(part) == 1 else label + side)
    code.add(label, JUMP_AT_LEAST, among[middle][0], sides[1], sides[0])
    for name, part in zip(sides, (among[:middle], among[middle:]), strict=True):
        if len(part) > 1:
            binary_search(code, name, part)


class Code:
    """Instructions with labels for where they jump to."""

    def __init__(self) -> None:
        self._parts: list[tuple[Step, tuple[str, str] | None]] = []
        self._labels: dict[str, int] = {}

    def add(self, label: str, step: "Step | int", value: int = 0, true: str = "", false: str = "") -> None:
        """An instruction as it is, or a jump to labels."""
        if label:
            self._labels[label] = len(self._parts)
        if isinstance(step, tuple):
            self._parts.append((step, None))
        else:
            self._parts.append(((step, 0, 0, value), (true, false)))

    def steps(self) -> list[Step]:
        """The instructions with their distances; a classic filter cannot jump further than 255."""
        found: list[Step] = []
        for index, (step, targets) in enumerate(self._parts):
            if targets is not None:
                true, false = (self._labels[target] - index - 1 for target in targets)
                assert 0 <= true < 256, index
                assert 0 <= false < 256, index
                step = (step[0], true, false, step[3])
            found.append(step)
        return found


def conditions() -> dict[str, list[Step]]:
    """Calls that depend on their arguments."""
    return {
        "ioctl": one_of(1, TERMINAL_QUERIES),
        "fcntl": [
            (LOAD, 0, 0, low(1)),
            (JUMP_EQUAL, 0, 4, SET_FLAGS),
            *passing_without(2, REFUSED_FLAGS),
            (RETURN, 0, 0, ALLOW),
            *one_of(1, DESCRIPTOR_COMMANDS),
        ],
        "kill": one_of(0, [OWN_PID]),
        "tgkill": one_of(0, [OWN_PID]),
        **dict.fromkeys(("getpgid", "getsid", "get_robust_list"), one_of(0, [0, OWN_PID])),
        # The C library makes this call for each thread, and works without it after ENOSYS.
        "sched_getaffinity": one_of(0, [0, OWN_PID], errno.ENOSYS),
        **dict.fromkeys(("clock_gettime", "clock_getres", "clock_nanosleep"), OWN_CLOCKS),
        "socketpair": one_of(0, [AF_UNIX]),
        "getsockopt": one_of(2, SOCKET_OPTIONS),
        "sendto": [*passing_without(3, 0xFFFFFFFF & ~SENDING_FLAGS), *null_pointer(4)],
        "recvfrom": [*passing_without(3, 0xFFFFFFFF & ~RECEIVING_FLAGS), (RETURN, 0, 0, ALLOW)],
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
    """Where the low half of an argument is."""
    return 16 + 8 * argument


def one_of(argument: int, values: Sequence[int], error: int = errno.EPERM) -> list[Step]:
    """Allow an argument that, as a 32-bit number, is one of these."""
    compare = [(JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [(LOAD, 0, 0, low(argument)), *compare, (RETURN, 0, 0, REFUSE | error), (RETURN, 0, 0, ALLOW)]


def passing_without(argument: int, bits: int) -> list[Step]:
    """Continue if an argument has none of these bits, else refuse."""
    return [(LOAD, 0, 0, low(argument)), (JUMP_BITS, 0, 1, bits), (RETURN, 0, 0, REFUSE | errno.EPERM)]


OWN_CLOCKS = [
    (LOAD, 0, 0, low(0)),
    (JUMP_AT_LEAST, 0, 3, NUM_CLOCKS),
    (JUMP_BITS, 2, 0, THREAD_CLOCK),
    (JUMP_EQUAL, 1, 0, 0xFFFFFFFF & OWN_CLOCK),
    (RETURN, 0, 0, REFUSE | errno.EPERM),
    (RETURN, 0, 0, ALLOW),
]
"""Allow the clocks of the machine and of the process itself: another's clock shows whether that process exists."""


def passing_if_zero(offset: int) -> list[Step]:
    """Continue if four bytes are zero, else refuse."""
    return [(LOAD, 0, 0, offset), (JUMP_EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE | errno.EPERM)]


def null_pointer(argument: int) -> list[Step]:
    """Allow an argument that is a null pointer."""
    return [*passing_if_zero(low(argument)), *passing_if_zero(low(argument) + 4), (RETURN, 0, 0, ALLOW)]
