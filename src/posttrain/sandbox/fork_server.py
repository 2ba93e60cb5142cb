"""Our side of a fork-server: starting it, and the messages to and from it."""

import array
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.sandbox.execution import Kind, Limits, ServerOptions
from posttrain.sandbox.inside import frames

INSIDE = Path(__file__).parent / "inside"
BOOTSTRAP = "import sys; exec(compile(open(sys.argv[1] + '/main.py', encoding='utf-8').read(), '<main>', 'exec'))"
"""Starts the server's text without its path, which tracebacks would show."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # else every thread reserves 64 MiB of address space, which is limited
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a program."""
START_SECONDS = 60.0
MESSAGE_BYTES = 1 << 16
UNPRIVILEGED = 65534
"""The user `nobody`, for programs when we are root."""


class ServerLost(Exception):
    """The fork-server is gone, or never came up."""


class ForkServerClient:
    """A running fork-server."""

    def __init__(self, options: ServerOptions) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        self.unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        """Messages that the socket had no room for yet."""
        self.uid = UNPRIVILEGED if os.geteuid() == 0 else None
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", BOOTSTRAP, str(INSIDE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C is ours to handle
            )
        finally:
            theirs.close()
        self.control.settimeout(START_SECONDS)
        asked: dict[str, Any] = {"prepare": options.prepare, "sealed": options.sealed, "uid": self.uid}
        asked |= {"modules": list(options.modules), "path": list(options.path)}
        try:
            self.control.send(json.dumps(asked).encode())
        except OSError as error:
            raise ServerLost(self.last_words()) from error
        ready = json.loads(self.receive())
        self.landlock: int = ready["landlock"]
        self.missing: dict[str, str] = ready["missing"]
        self.control.setblocking(False)

    def fileno(self) -> int:
        return self.control.fileno()

    def start(self, job: int, kind: Kind, limits: Limits, descriptors: Sequence[int]) -> None:
        """Fork a process with these descriptors as input, output, error and channel; ours are closed."""
        seconds = int(limits.cpu_seconds) + 2  # the pool ends it on time; this is in case the pool cannot
        request = frames.start.pack(frames.START, job, frames.KINDS.index(kind), seconds, limits.memory_bytes)
        self.unsent.append((request, descriptors))
        self.flush()

    def kill(self, job: int) -> None:
        self.unsent.append((frames.kill.pack(frames.KILL, job), []))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it; sent descriptors are closed here."""
        while self.unsent:
            request, descriptors = self.unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self.control.sendmsg([request], rights)
            except BlockingIOError:
                return
            except OSError as error:
                raise ServerLost(self.last_words()) from error
            self.unsent.popleft()
            close(descriptors)

    def receive(self) -> bytes:
        """The next message.  Raises BlockingIOError where there is none yet, and ServerLost."""
        try:
            payload = self.control.recv(MESSAGE_BYTES)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ServerLost(self.last_words()) from error
        if not payload:
            raise ServerLost(self.last_words())
        return payload

    def last_words(self) -> str:
        self.process.kill()
        _, errors = self.process.communicate()
        return errors.decode("utf-8", "replace")[-2000:] or "no message"

    def close(self) -> None:
        for _, descriptors in self.unsent:
            close(descriptors)
        self.unsent.clear()
        self.control.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
