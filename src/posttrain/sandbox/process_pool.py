"""A fork-server and the processes that it runs, many at once; messages of each go to its conversation."""

import array
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.sandbox.elsewhere import INSIDE
from posttrain.sandbox.execution import ENVIRONMENT, Conversation, Exit, Kind, Limits, Process, Sandbox, ServerOptions
from posttrain.sandbox.inside import frames
from posttrain.sandbox.probes import PROBES, Finding, require_passed
from posttrain.sandbox.sandboxed_process import SandboxedProcess

BOOTSTRAP = "import sys; exec(compile(open(sys.argv[1] + '/main.py', encoding='utf-8').read(), '<main>', 'exec'))"
"""Starts the server's text without its path, which tracebacks would show."""
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
        """The next message.  Raises BlockingIOError if there is none yet, and ServerLost."""
        try:
            payload = self.control.recv(MESSAGE_BYTES)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
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


TICK_SECONDS = 0.02
"""How often limits are checked."""
SERVER_PATIENCE_SECONDS = 5.0
"""How long the server may take to end a process before it counts as lost."""


class ProcessPool(Sandbox):
    """A fork-server and the processes that it has running; open until closed.  For one thread."""

    start_seconds = 0.0

    def __init__(
        self,
        options: ServerOptions | None = None,
        *,
        at_once: int | None = None,
        server: ForkServerClient | None = None,
    ) -> None:
        """A `server` that is given is running and is not probed again; else one is started when needed."""
        self.options = options or ServerOptions()
        self.at_once = at_once or max(1, os.cpu_count() or 1)
        self.server: ForkServerClient | None = None
        self.selector = selectors.DefaultSelector()
        self.found: list[Finding] = []
        """What the probes found when the server was started."""
        self.running: dict[int, SandboxedProcess] = {}
        self.owner: dict[int, Conversation] = {}
        self._number = 0
        self._looked = 0.0
        if server is not None:
            self._take(server)

    def converse(self, conversations: Sequence[Conversation]) -> None:
        waiting = deque(conversations)
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.at_once:
                    waiting.popleft().begin(self)
                self._wait()
        except BaseException:
            self.close()  # nothing keeps running after an interrupt
            raise

    def start(self, conversation: Conversation, asked: Process) -> SandboxedProcess:
        server = self.opened()
        self._number += 1
        number = self._number
        process = SandboxedProcess(
            number, asked, lambda process, payload: conversation.message(self, process, payload), self.end
        )
        self.running[number], self.owner[number] = process, conversation
        try:
            given, process.given = process.given, []  # closed once they are sent
            server.start(number, asked.kind, asked.limits, given)
        except ServerLost:
            self._lose()
            return process
        self._watch(process.output, lambda: process.read_output())
        self._watch(process.errors, lambda: process.read_errors())
        self._watch(process.channel.fileno(), lambda: process.read_channel())
        return process

    def end(self, process: SandboxedProcess, why: Exit = Exit.ENDED) -> None:
        if process.condemned is not None:
            return
        process.verdict, process.condemned = why, time.monotonic()
        if self.server is not None and process.number in self.running:
            try:
                self.server.kill(process.number)
            except ServerLost:
                self._lose()

    def close(self) -> None:
        self._end_all()

    def opened(self) -> ForkServerClient:
        """The server, started and probed.  Raises SandboxUnavailable if a probe was not refused."""
        if self.server is None:
            server = ForkServerClient(self.options)
            try:
                self.found = probed(server, self.options)
                if self.options.sealed:
                    require_passed(self.found)
            except BaseException:
                server.close()
                raise
            self._take(server)
        assert self.server is not None
        return self.server

    def _take(self, server: ForkServerClient) -> None:
        self.server = server
        self.selector.register(server, selectors.EVENT_READ, self._hear)

    def _watch(self, descriptor: int, read: Callable[[], bool]) -> None:
        def ready() -> None:
            if not read():
                self.selector.unregister(descriptor)

        self.selector.register(descriptor, selectors.EVENT_READ, ready)

    def _wait(self) -> None:
        now = time.monotonic()  # before anything is read: an answer that waits for us does not pass a limit
        for key, _ in self.selector.select(TICK_SECONDS):
            if self.selector.get_map().get(key.fileobj) is key:  # not closed meanwhile, its number given to another
                key.data()
        if self.server is not None:
            try:
                self.server.flush()
            except ServerLost:
                self._lose()
        if now - self._looked >= TICK_SECONDS:
            self._looked = now
            self._look(now)

    def _look(self, now: float) -> None:
        """Enforce the limits of every process, and the server's duty to end those that we end."""
        for process in list(self.running.values()):
            process.channel.flush()
            if process.condemned is not None:
                if now - process.condemned > SERVER_PATIENCE_SECONDS:
                    self._lose()  # stopped, or stuck: its processes end with it
                    return
                continue
            over = process.over_limit(now)
            if over is not None:
                self.end(process, over)

    def _hear(self) -> None:
        assert self.server is not None
        try:
            while True:
                message = self.server.receive()
                if message[0] == frames.STARTED:
                    _, job, pid = frames.started.unpack(message)
                    if job in self.running:
                        self.running[job].pid = pid
                else:
                    _, job, status, cpu_seconds, memory_bytes = frames.ended.unpack(message)
                    if job in self.running:
                        process, conversation = self.running.pop(job), self.owner.pop(job)
                        ended = process.concluded(status, cpu_seconds, memory_bytes)
                        self._forget(process)
                        conversation.ended(self, process, ended)
        except BlockingIOError:
            return
        except ServerLost:
            self._lose()

    def _lose(self) -> None:
        """The server has ended, and its processes with it.  The next start makes another."""
        for process, conversation in self._end_all():
            conversation.ended(self, process, process.execution(Exit.LOST))

    def _end_all(self) -> list[tuple[SandboxedProcess, Conversation]]:
        """End the server; returns the processes that were running, and whose they were."""
        if self.server is not None:
            self.selector.unregister(self.server)
            self.server.close()
            self.server = None
        running = [(process, self.owner[number]) for number, process in self.running.items()]
        self.running.clear()
        self.owner.clear()
        for process, _ in running:
            self._forget(process)
        return running

    def _forget(self, process: SandboxedProcess) -> None:
        for descriptor in (process.output, process.errors, process.channel.fileno()):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        process.close()


def probed(server: ForkServerClient, options: ServerOptions) -> list[Finding]:
    pool = ProcessPool(options, server=server)
    try:
        ran = pool.run(Process(kind="program", source=each.source, limits=each.limits) for each in PROBES)
    finally:
        pool.selector.close()  # the pool only borrowed the server
    return [Finding(probe, each) for probe, each in zip(PROBES, ran, strict=True)]
