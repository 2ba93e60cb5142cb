"""Other places on this machine where a program can be run once: bubblewrap and containers.

In bubblewrap a seccomp filter refuses namespaces, mounts and hidden memory.  Without it a program could be root in a
namespace, with a file system in memory beyond our limits, or with files in memory that belong to no process.
"""

import errno
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO

from posttrain.sandbox.elsewhere import FILE_BYTES, PROCESSES, START_CPU_SECONDS, Backend, Conditions, ReplayRun, lost
from posttrain.sandbox.execution import ENVIRONMENT, Execution, Exit
from posttrain.sandbox.inside import filter as bpf
from posttrain.sandbox.sandboxed_process import PATIENCE, MachineWaits

NAMESPACES = 0x7E020000
"""CLONE_NEW*, all of them."""
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
    load, equal, leave = bpf.LOAD, bpf.JUMP_EQUAL, bpf.RETURN
    refuse, absent = (leave, 0, 0, bpf.REFUSE | errno.EPERM), (leave, 0, 0, bpf.REFUSE | errno.ENOSYS)
    steps = [(load, 0, 0, 4), (equal, 1, 0, bpf.ARCHITECTURES[machine]), (leave, 0, 0, bpf.KILL), (load, 0, 0, 0)]
    if machine == "x86_64":
        steps += [(bpf.JUMP_AT_LEAST, 0, 1, bpf.X32_BIT), absent]
    for number in REFUSED[machine]:
        steps += [(equal, 0, 1, number), refuse]
    # Without clone3 the C library makes processes with clone, whose flags can be seen.
    steps += [(equal, 0, 1, CLONE3), absent, (equal, 0, 3, CLONE[machine]), (load, 0, 0, 16)]
    steps += [(bpf.JUMP_BITS, 0, 1, NAMESPACES), refuse, (leave, 0, 0, bpf.ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


POLL_SECONDS = 0.005
READ_BYTES = 1 << 16
BOOTSTRAP = "import os,sys;n=int(sys.argv[1]);b=b''\nwhile len(b)<n:b+=os.read(0,n-len(b))\nexec(b.decode())"
"""Reads the run's text from standard input, and leaves what follows to the program."""


class CommandBackend(Backend):
    """A backend that starts a command on this machine for every run; its subclasses say which."""

    conditions = Conditions()
    here = True

    def __init__(self) -> None:
        self.live: dict[subprocess.Popen[bytes], ReplayRun] = {}
        self.lock = threading.Lock()

    def command(self, run: ReplayRun, arguments: Sequence[str], passed: Sequence[int]) -> list[str]:
        """The command, ending in an interpreter with these arguments; it inherits the descriptors `passed`."""
        raise NotImplementedError

    def passed(self) -> AbstractContextManager[tuple[int, ...]]:
        return nullcontext(())

    def environment(self, run: ReplayRun, ours: Mapping[str, str]) -> dict[str, str]:
        """The environment of the command; `ours` is that of this process."""
        return dict(ours)

    def cpu_seconds(self, pid: int, seen: dict[int, float]) -> float:
        """Processor time that a run has used so far, 0 if unknown; `seen` keeps that of each process."""
        return 0.0

    def removed(self, run: ReplayRun) -> None:
        """Remove a run where ending the command does not end it."""

    def run(self, run: ReplayRun) -> Execution:
        text = run.text.encode("ascii")
        began = time.monotonic()
        arguments = ["-s", "-S", "-B", "-c", BOOTSTRAP, str(len(text))]
        with given_as_file(text + run.stdin) as given, self.passed() as passed:
            try:
                process = subprocess.Popen(
                    self.command(run, arguments, passed),
                    pass_fds=passed,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self.environment(run, {**os.environ, **run.canary}),
                    start_new_session=True,
                )
            except OSError as error:
                return lost(f"{type(error).__name__}: {error}", time.monotonic() - began)
        with self.lock:
            self.live[process] = run
        try:
            return self.watched(run, process, began)
        finally:
            with self.lock:
                self.live.pop(process, None)
            self.removed(run)

    def watched(self, run: ReplayRun, process: "subprocess.Popen[bytes]", began: float) -> Execution:
        """Hold a process to its wall clock and its output, and wait for its end."""
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = BoundedPipeReader(process.stdout, run.limits.output_bytes + 1)
        stderr = BoundedPipeReader(process.stderr, run.limits.error_bytes + READ_BYTES)
        allowed, waits = run.limits.wall_seconds + self.start_seconds, MachineWaits()
        stopped, starved, cpu_seconds, seen = None, False, 0.0, dict[int, float]()
        while (status := process.poll()) is None:
            cpu_seconds = max(cpu_seconds, self.cpu_seconds(process.pid, seen))
            if stopped is None:
                if len(stdout.content) >= stdout.most:
                    stopped = Exit.OUTPUT_LIMIT
                elif cpu_seconds > run.limits.cpu_seconds + START_CPU_SECONDS:
                    stopped = Exit.CPU_LIMIT
                elif time.monotonic() - began - waits.seconds() > allowed:
                    stopped = Exit.WALL_LIMIT
                elif time.monotonic() - began > PATIENCE * allowed:
                    stopped, starved = Exit.WALL_LIMIT, True
                if stopped is not None:
                    process.kill()
                    self.removed(run)
            time.sleep(POLL_SECONDS)
        return Execution(
            exit=stopped or Exit.FINISHED,
            status=status,
            stdout=stdout.taken(),
            stderr=stderr.taken(),
            wall_seconds=time.monotonic() - began,
            cpu_seconds=cpu_seconds,
            starved=starved,
            waited_seconds=waits.seconds(),
        )

    def stop(self) -> None:
        with self.lock:
            live = dict(self.live)
        for process, run in live.items():
            process.kill()
            self.removed(run)


@contextmanager
def given_as_file(content: bytes) -> Iterator[IO[bytes]]:
    """A nameless file of this content, read-only where the system supports that."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        again = Path(f"/proc/self/fd/{file.fileno()}")
        if not again.exists():
            yield file
            return
        with again.open("rb") as reader:
            yield reader


class BoundedPipeReader:
    """The content of a pipe, read by a thread up to a limit; the rest is dropped."""

    def __init__(self, pipe: IO[bytes], most: int) -> None:
        self.pipe, self.most = pipe, most
        self.content = bytearray()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        while part := os.read(self.pipe.fileno(), READ_BYTES):
            self.content += part[: self.most - len(self.content)]

    def taken(self) -> bytes:
        """All of it, once the process has ended; a pipe that others hold open is not waited for."""
        self.thread.join(timeout=1.0)
        if not self.thread.is_alive():
            self.pipe.close()
        return bytes(self.content)


def hash_seed(run: ReplayRun) -> dict[str, str]:
    return {} if run.seed is None else {"PYTHONHASHSEED": str(run.seed)}


UNSHARED = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


class Bubblewrap(CommandBackend):
    """Namespaces for every run: files that come and go with it, no network, processes it may start."""

    name = "bubblewrap"
    bounded_as_a_whole, tells_cpu = False, True
    start_seconds = 5.0
    remedy = (
        "bubblewrap >= 0.8 must be installed and allowed to make namespaces; Ubuntu >= 23.10 restricts them with"
        " AppArmor, and containers without CAP_SYS_ADMIN refuse them"
    )

    def __init__(self, path: Sequence[str] = ()) -> None:
        super().__init__()
        # Root makes the namespaces itself and gives itself up inside: as root a program's processes are not counted.
        self.conditions = Conditions(path=path, gives_up_root=os.geteuid() == 0)

    @contextmanager
    def passed(self) -> Iterator[tuple[int, ...]]:
        with given_as_file(filter_bytes()) as file:
            yield (file.fileno(),)

    def command(self, run: ReplayRun, arguments: Sequence[str], passed: Sequence[int]) -> list[str]:
        prefix = os.path.realpath(sys.base_prefix)
        interpreter = os.path.join(prefix, "bin", os.path.basename(os.path.realpath(sys.executable)))
        seen = dict.fromkeys(map(os.path.realpath, [prefix, os.path.dirname(os.__file__), *self.conditions.path]))
        command = [
            shutil.which("bwrap") or "bwrap",
            *UNSHARED,
            *("--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        ]
        if self.conditions.gives_up_root:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--disable-userns"]
        for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"):
            command += ["--ro-bind-try", folder, folder]
        for folder in seen:
            if not folder.startswith("/usr/"):
                for above in reversed(Path(folder).parents[:-1]):  # else each with the rights that it has out here
                    command += ["--perms", "0755", "--dir", str(above)]
                command += ["--ro-bind", folder, folder]
        command += ["--proc", "/proc", "--dev", "/dev", "--size", str(FILE_BYTES), "--tmpfs", "/dev/shm"]
        command += ["--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(passed[0]), "--", interpreter]
        return [*command, *arguments]

    def environment(self, run: ReplayRun, ours: Mapping[str, str]) -> dict[str, str]:
        return {**ENVIRONMENT, "HOME": "/tmp", **hash_seed(run)}

    def cpu_seconds(self, pid: int, seen: dict[int, float]) -> float:
        known = 0.0
        for process, own, waited_for in processes_below(pid):
            known += own + waited_for
            seen[process] = own
        # A process that ignores the end of its children does not get their time: keep the time last seen.
        return max(known, sum(seen.values()))


def processes_below(pid: int) -> Iterator[tuple[int, float, float]]:
    """A process and all that it has started, with processor seconds: its own, and of children that it waited for."""
    try:
        # After the name, which may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it is gone
        return
    ticks = os.sysconf("SC_CLK_TCK")
    yield pid, sum(map(int, fields[11:13])) / ticks, sum(map(int, fields[13:15])) / ticks
    for child in children:
        yield from processes_below(int(child))


class Container(CommandBackend):
    """A container for every run, by docker, podman or a command that takes the same arguments."""

    bounded_as_a_whole, tells_cpu = True, False
    start_seconds = 30.0

    def __init__(self, command: str, image: str) -> None:
        super().__init__()
        self.program, self.image = shlex.split(command), image
        self.name = f"{command} ({image})"
        self.remedy = f"`{command} run --rm {image} python3 -c pass` must work, and the image must have Python >= 3.10"

    def command(self, run: ReplayRun, arguments: Sequence[str], passed: Sequence[int]) -> list[str]:
        memory = run.limits.memory_bytes + (256 << 20)
        return [
            *(*self.program, "run", "--rm", "--interactive", "--name", container_name(run), "--pull", "never"),
            *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", f"{run.user}:{run.user}", "--pids-limit", str(PROCESSES)),
            *("--memory", str(memory), "--cpus", "1"),
            *("--ulimit", "nofile=256:256", "--ulimit", "nproc=1024:1024"),
            *("--tmpfs", f"/tmp:rw,exec,size={FILE_BYTES},mode=1777", "--workdir", "/tmp", "--env", "HOME=/tmp"),
            *(part for name, value in hash_seed(run).items() for part in ("--env", f"{name}={value}")),
            *("--entrypoint", "python3", self.image, *arguments),
        ]

    def removed(self, run: ReplayRun) -> None:
        """Ending the command leaves the container running: it is ended by name."""
        arguments = [*self.program, "rm", "--force", container_name(run)]
        quiet = subprocess.DEVNULL
        subprocess.run(arguments, stdout=quiet, stderr=quiet, check=False, timeout=self.start_seconds)


def container_name(run: ReplayRun) -> str:
    return f"posttrain-{run.mark}"
