"""A seccomp filter for programs that may do most things: no namespaces of their own, no mounts, no hidden memory.

Without it a program in bubblewrap could make a namespace in which it is root, and there a file system in memory that no
limit of ours counts; or files in memory by name of nobody.  In the format that `bwrap --seccomp` reads.
"""

import errno
import platform
import struct

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NAMESPACES = 0x7E020000
"""CLONE_NEW*, all of them."""
X32_BIT = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
NEW_CALLS = (425, 426, 427, 428, 429, 430, 431, 432, 442, 447)
"""io_uring, open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr, memfd_secret: the same everywhere."""
REFUSED = {
    # ptrace, pivot_root, mount, umount2, kexec_load, add_key, request_key, keyctl, unshare, perf_event_open,
    # open_by_handle_at, setns, memfd_create, bpf, userfaultfd, shmget
    "x86_64": (101, 155, 165, 166, 246, 248, 249, 250, 272, 298, 304, 308, 319, 321, 323, 29, *NEW_CALLS),
    "aarch64": (117, 41, 40, 39, 104, 217, 218, 219, 97, 241, 265, 268, 279, 280, 282, 194, *NEW_CALLS),
}


def filter_bytes(machine: str = platform.machine()) -> bytes:
    """`struct sock_filter` after `struct sock_filter`."""
    refuse = REFUSE | errno.EPERM
    steps = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":
        steps += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for number in REFUSED[machine]:
        steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    # Without clone3 the C library makes processes with clone, whose flags can be seen.
    steps += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    steps += [
        (JUMP_EQUAL, 0, 3, CLONE[machine]),
        (LOAD, 0, 0, 16),
        (JUMP_BITS, 0, 1, NAMESPACES),
        (RETURN, 0, 0, refuse),
    ]
    steps += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
