"""System calls that a sealed process may make, by name, and their numbers on the two machines we know."""

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
"""Memory; what is open already; time; threads and signals of its own; who it is.  `filter` has those that depend on
their arguments."""

ALLOWED = tuple(_ALLOWED.split())
"""No path, no socket, no process, no name of the machine: nothing that names something outside."""

NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
        "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16, "pread64": 17,
        "pwrite64": 18, "readv": 19, "writev": 20, "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25,
        "madvise": 28, "dup": 32, "dup2": 33, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38,
        "getpid": 39, "sendto": 44, "recvfrom": 45, "shutdown": 48, "getsockname": 51, "getpeername": 52,
        "socketpair": 53, "setsockopt": 54, "getsockopt": 55, "clone": 56, "exit": 60, "kill": 62, "uname": 63,
        "fcntl": 72, "fsync": 74, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100,
        "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getpgid": 121,
        "getsid": 124, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
        "set_tid_address": 218, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
        "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234,
        "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "get_robust_list": 274, "epoll_pwait": 281,
        "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "prlimit64": 302, "getcpu": 309,
        "getrandom": 318, "membarrier": 324, "rseq": 334, "clone3": 435, "close_range": 436,
    },
    "aarch64": {
        "eventfd2": 19, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23, "dup3": 24, "fcntl": 25,
        "ioctl": 29, "close": 57, "pipe2": 59, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66,
        "pread64": 67, "pwrite64": 68, "pselect6": 72, "ppoll": 73, "fstat": 80, "fsync": 82, "exit": 93,
        "exit_group": 94, "set_tid_address": 96, "futex": 98, "set_robust_list": 99, "get_robust_list": 100,
        "nanosleep": 101, "getitimer": 102, "setitimer": 103, "clock_gettime": 113, "clock_getres": 114,
        "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124, "restart_syscall": 128, "kill": 129,
        "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "times": 153, "getpgid": 155, "getsid": 156, "uname": 160, "getrlimit": 163, "getrusage": 165, "getcpu": 168,
        "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176,
        "getegid": 177, "gettid": 178, "sysinfo": 179, "socketpair": 199, "getsockname": 204, "getpeername": 205,
        "sendto": 206, "recvfrom": 207, "setsockopt": 208, "getsockopt": 209, "shutdown": 210, "brk": 214,
        "munmap": 215, "mremap": 216, "clone": 220, "mmap": 222, "mprotect": 226, "madvise": 233, "prlimit64": 261,
        "getrandom": 278, "membarrier": 283, "rseq": 293, "clone3": 435, "close_range": 436,
    },
}  # fmt: skip
"""A name that is missing does not exist on that machine."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h."""
