"""One worker, seen from our side: its process, the socket to it, and the call that is with it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.rewards.grading.calls import Deadline, after
from posttrain.rewards.grading.function import FunctionSource
from posttrain.rewards.grading.workers.worker_messages import dump

ROOT = Path(__file__).parents[4]
"""The folder that holds this package."""
START_SECONDS = 120.0
"""How long a worker may take to import what the function needs."""
END_SECONDS = 5.0
"""How long a process that is killed may take to be gone."""
READ_BYTES = 1 << 16


class WorkerLost(Exception):
    """The process is gone, or says what is no message."""


class Worker:
    """A process that calls one function; at most one call is with it."""

    def __init__(self, source: FunctionSource) -> None:
        self.ready = False
        """Whether it has loaded the function."""
        self.idle = False
        """Whether it waits for a call."""
        self.deadline = after(START_SECONDS, f"it was not ready to be called within {START_SECONDS:g} s")
        """When what it is at has to be done."""
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.socket, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posttrain.rewards.grading.workers.worker_main", str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=2,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # the terminal's Ctrl-C is ours to handle, and its children end with it
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.socket.setblocking(False)
        self.send({"place": source.place, "name": source.name, "path": sys.path})

    def fileno(self) -> int:
        return self.socket.fileno()

    def ask(self, payload: bytes, deadline: Deadline) -> None:
        """Hand it a call."""
        assert self.idle
        self.idle, self.deadline = False, deadline
        self.queue(payload)

    def send(self, message: dict[str, object]) -> None:
        """Send a message."""
        self.queue(dump(message))

    def queue(self, payload: bytes) -> None:
        """Send the bytes of a message as the socket takes them; the caller flushes what is left over."""
        self.outgoing += len(payload).to_bytes(4, "little") + payload
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes."""
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:  # it is gone, as reading from it will show
            self.outgoing.clear()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it has said.  Raises WorkerLost."""
        try:
            part = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise WorkerLost from error
        if not part:
            raise WorkerLost
        self.incoming += part
        while len(self.incoming) >= 4 and len(self.incoming) >= (end := 4 + self.length):
            payload = bytes(self.incoming[4:end])
            del self.incoming[:end]
            try:
                message = json.loads(payload)
            except ValueError as error:
                raise WorkerLost from error
            yield message

    @property
    def length(self) -> int:
        """Length of the message that is arriving."""
        return int.from_bytes(self.incoming[:4], "little")

    def is_gone(self) -> bool:
        """Whether an idle process has ended."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> int:
        """End it, with all that it has started; returns its exit status, which is its own where it had ended."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # before it is waited for: till then the number is its own
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # stuck in the kernel, as on a file system that does not answer
            return -signal.SIGKILL
