"""The fork-server: an interpreter that has imported what programs import, and forks a sealed child for each.

    python -I -S -B -c BOOTSTRAP FOLDER CONTROL_FD   (posttrain.sandbox.process_pool)

It is started fresh, never forked from a trainer, with an empty environment and one descriptor, a SEQPACKET socket.
What to load comes as JSON and is answered by {"ready": ...}.  Then come jobs, each with four descriptors (standard
input, output, error, channel), and orders to kill one; each job is answered at its start and its end (frames.py).
When the socket closes the server ends, and its children with it.  It runs one thread, so a fork never copies a held
lock.
"""

import atexit
import ctypes
import encodings.idna  # noqa: F401  # with fcntl what the probes need, so that they are refused for the right reason
import fcntl  # noqa: F401
import gc
import importlib
import importlib.machinery
import json
import os
import platform
import select
import signal
import socket
import struct
import sys
import types
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class OwnText(importlib.machinery.SourceFileLoader):
    """Our module under its name only, so that no program learns its path."""

    def __init__(self, name: str, text: bytes) -> None:
        super().__init__(name, f"<{name}>")
        self.text = text

    def path_stats(self, path: object) -> "NoReturn":
        raise OSError(f"{path} is not a file")  # so that no compiled file is looked for

    def get_data(self, path: object) -> bytes:
        return self.text


class Siblings:
    """Finds the other files of this folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: object) -> "importlib.machinery.ModuleSpec | None":
        try:
            with open(f"{self.folder}/{name}.py", "rb") as file:
                return importlib.machinery.ModuleSpec(name, OwnText(name, file.read()))
        except FileNotFoundError:
            return None


siblings = Siblings(sys.argv[1])
sys.meta_path.insert(0, siblings)

import frames  # noqa: E402
import runner  # noqa: E402
from lockdown import Seal, be_nowhere  # noqa: E402

del sys.meta_path[0]
siblings.folder = ""

MESSAGE_BYTES = 1 << 16
FOUR = struct.Struct("4i")
RIGHTS_BYTES = socket.CMSG_SPACE(FOUR.size)
NOT_SEALED = 97
"""Exit status of a child that could not be sealed and therefore ran nothing."""


class ForkServer:
    """Children by job, and the jobs to start."""

    def __init__(self, control: socket.socket, seal: Seal) -> None:
        self.control, self.seal = control, seal
        self.channel = frames.Descriptor(3)
        self.fork = ctypes.PyDLL(None).fork
        self.jobs: dict[int, int] = {}  # pid -> job
        self.pids: dict[int, int] = {}

    def serve(self, wake: int) -> None:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == wake:
                    os.read(wake, 4096)
                    self.reap()
                elif not self.take():
                    return

    def take(self) -> bool:
        """One message; whether there was one."""
        message, ancillary, _, _ = self.control.recvmsg(MESSAGE_BYTES, RIGHTS_BYTES)
        if not message:
            return False
        if message[0] == frames.KILL:
            pid = self.pids.get(frames.kill.unpack(message)[1])
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        else:
            descriptors = FOUR.unpack(ancillary[0][2])
            self.start(frames.start.unpack(message), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def start(self, request: tuple[int, ...], descriptors: tuple[int, ...]) -> None:
        # Not os.fork: Python's own hooks after a fork mend locks that other threads may have held, and here is one
        # thread; they take a seventh of what a small program takes.
        pid = self.fork()
        if pid == 0:
            self.become_child(request, descriptors)
        job = request[1]
        if pid < 0:  # no room for a process: this job is lost, and only this one
            self.control.send(frames.ended.pack(frames.ENDED, job, NOT_SEALED << 8, 0.0, 0))
            return
        self.jobs[pid], self.pids[job] = job, pid
        self.control.send(frames.started.pack(frames.STARTED, job, pid))

    def become_child(self, request: tuple[int, ...], descriptors: tuple[int, ...]) -> None:
        """In the child: never returns."""
        status = NOT_SEALED
        try:
            signal.set_wakeup_fd(-1)
            for place, descriptor in enumerate(descriptors):  # all of them above 3: lower ones were open before
                os.dup2(descriptor, place)
            os.closerange(4, 1 << 16)
            _, _, kind, cpu_seconds, memory_bytes = request
            self.seal.seal(cpu_seconds, memory_bytes)
            status = runner.run_kind(frames.KINDS[kind], self.channel)
        except BaseException as error:  # noqa: BLE001  # a child must never return into the server's loop
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
        finally:
            os._exit(status)  # without unwinding anything of the server's

    def reap(self) -> None:
        """Report every child that has ended."""
        while self.jobs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            job = self.jobs.pop(pid)
            del self.pids[job]
            cpu = usage.ru_utime + usage.ru_stime
            self.control.send(frames.ended.pack(frames.ENDED, job, status, cpu, usage.ru_maxrss * 1024))


def start_server() -> None:
    """Load the requested modules, then serve."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=int(sys.argv[2]))
    asked = json.loads(control.recv(MESSAGE_BYTES))
    null = os.open(os.devnull, os.O_RDWR)
    before = list(sys.path)
    sys.path += asked["path"]
    missing = {}
    for name in asked["modules"]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # importing runs any code: `missing` reports its error
            missing[name] = f"{type(error).__name__}: {error}"
    compile("", "<nothing>", "exec")  # the first one makes a class for every kind of syntax node: 1.5 ms in each child
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the poll; children have no children, so it may stay
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    prepared = sys.modules["prepared"] = types.ModuleType("prepared")  # what our own source loads and warms up
    runner.execute(asked["prepare"], prepared)
    sys.path[:] = before
    server = ForkServer(control, Seal(sealed=asked["sealed"]))
    kept = os.dup(2)
    runner.open_streams()
    for descriptor, end in ((0, null), (1, null), (2, kept)):
        os.dup2(end, descriptor)
    os.close(kept)
    # Forget exit functions of modules that were loaded here: only a program's own run at its end.
    vars(atexit)["_clear"]()
    type.__setattr__(weakref.finalize, "_registered_with_atexit", False)  # else its own would be forgotten as well
    runner.be_like_a_script()
    if asked["sealed"]:
        be_nowhere(platform.machine())
    gc.collect()
    gc.freeze()
    server.seal.confine(asked["uid"])
    control.send(json.dumps({"ready": os.getpid(), "landlock": server.seal.landlock, "missing": missing}).encode())
    server.serve(wake)


if __name__ == "__main__":
    start_server()
