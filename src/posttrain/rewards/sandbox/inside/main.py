"""The fork-server: an interpreter that has imported what programs import, and forks a sealed child for each.

    python -I -S -B main.py CONTROL_FD

It is started fresh, never forked from a trainer, with an empty environment and one descriptor, a SEQPACKET socket over
which all is JSON: first what to load, answered by {"ready": ...}; then jobs, each with four
descriptors (standard input, output, error, channel), answered by {"started": job, "pid"} and in the end {"ended": job,
"status", "cpu_seconds", "memory_bytes"}; and {"kill": job}.  When the socket closes it ends, and its children with it.
It runs one thread, so that a fork copies no lock that somebody holds.
"""

import ctypes
import encodings.idna  # noqa: F401  # with fcntl what the probes need, so that they are refused for the right reason
import fcntl  # noqa: F401
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
from dataclasses import replace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import running
from lockdown import Limits, Sealing

del sys.path[0]

MESSAGE_BYTES = 1 << 16
UNSEALED_FILE_BYTES = 1 << 24
NOT_SEALED = 97
"""Exit status of a child that could not be sealed and therefore ran nothing."""


class Server:
    """Children by job, and the jobs that are to start."""

    def __init__(self, control: socket.socket, *, sealed: bool) -> None:
        self.control, self.sealed, self.sealing = control, sealed, Sealing()
        self.pid = os.getpid()
        self.fork = ctypes.PyDLL(None).fork
        self.jobs: dict[int, int] = {}  # pid -> job
        self.pids: dict[int, int] = {}

    def serve(self, wake: int) -> None:
        """Until the other side closes."""
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
        message, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 4)
        if not message:
            return False
        request = json.loads(message)
        if "kill" in request:
            self.kill(request["kill"])
        else:
            self.start(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        # Not os.fork: Python's own hooks after a fork mend locks that other threads may have held, and here is one
        # thread; they take a seventh of what a small program takes.
        pid = self.fork()
        if pid == 0:
            self.become_child(request, descriptors)
        self.jobs[pid], self.pids[request["job"]] = request["job"], pid
        self.tell({"started": request["job"], "pid": pid})

    def become_child(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """In the child: never returns."""
        status = NOT_SEALED
        try:
            signal.set_wakeup_fd(-1)
            for place, descriptor in enumerate(descriptors):  # all of them above 3: lower ones were open before
                os.dup2(descriptor, place)
            os.closerange(4, 1 << 16)
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=3)
            self.control.detach()
            limits = Limits(request["cpu_seconds"], request["memory_bytes"])
            if self.sealed:
                self.sealing.seal(limits, self.pid, request["uid"])
            else:
                self.sealing.bound(replace(limits, file_bytes=UNSEALED_FILE_BYTES), self.pid)
            status = running.run(request["kind"], channel)
        except BaseException as error:  # noqa: BLE001  # nothing may unwind into the server's own frames
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "backslashreplace"))
            status = status if status == NOT_SEALED else 1
        finally:
            running.end(status)

    def kill(self, job: int) -> None:
        if job in self.pids:
            os.kill(self.pids[job], signal.SIGKILL)

    def reap(self) -> None:
        """Tell of every child that has ended."""
        while self.jobs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            job = self.jobs.pop(pid)
            del self.pids[job]
            cpu = usage.ru_utime + usage.ru_stime
            self.tell({"ended": job, "status": status, "cpu_seconds": cpu, "memory_bytes": usage.ru_maxrss * 1024})

    def tell(self, message: dict[str, object]) -> None:
        self.control.send(json.dumps(message).encode())


def preload(modules: list[str]) -> dict[str, str]:
    """Import what programs will import; returns what could not be, with the reason."""
    missing = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # told, module by module
            missing[name] = f"{type(error).__name__}: {error}"
    return missing


def prepare(source: str) -> None:
    """Run our own source as the module `prepared`, so that what it loads and warms up is there in every child."""
    module = types.ModuleType("prepared")
    sys.modules["prepared"] = module
    running.execute(source, module)


def main() -> None:
    """Load what was asked for, then serve."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=int(sys.argv[1]))
    asked = json.loads(control.recv(MESSAGE_BYTES))
    null = os.open(os.devnull, os.O_RDWR)
    before = list(sys.path)
    sys.path += asked["path"]
    missing = preload(asked["modules"])
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the poll; children have no children, so it may stay
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    prepare(asked["prepare"])
    sys.path[:] = before
    server = Server(control, sealed=asked["sealed"])
    kept = os.dup(2)
    running.open_streams()
    for descriptor, end in ((0, null), (1, null), (2, kept)):
        os.dup2(end, descriptor)
    os.close(kept)
    gc.collect()
    gc.freeze()
    server.tell({"ready": server.pid, "landlock": server.sealing.landlock, "missing": missing})
    server.serve(wake)


if __name__ == "__main__":
    main()
