"""One process in the sandbox, seen from outside: its input, its output, its use of resources."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

from posttrain.sandbox.execution import Execution, Exit, Process
from posttrain.sandbox.inside.frames import ChannelClosed
from posttrain.sandbox.message_stream import READ_BYTES, MessageStream, MessageTooLong
from posttrain.sandbox.processor_waits import PATIENCE, ProcessWaits

PIPE_BYTES = 1 << 12
LAST_READS = 16
"""More than what a pipe or a socket holds of a process that is gone."""
NOT_SEALED = 97
"""Exit status of a child that could not be sealed and therefore ran nothing."""


class SandboxedProcess:
    """A process, from the request for it to its end."""

    def __init__(
        self,
        number: int,
        asked: Process,
        on_message: Callable[["SandboxedProcess", bytes], None],
        on_end: Callable[["SandboxedProcess", Exit], None],
    ) -> None:
        self.number, self.asked, self.on_message, self.on_end = number, asked, on_message, on_end
        self.waits = ProcessWaits()
        self.began = self.waits.began
        self.cpu_until = asked.limits.cpu_seconds
        self.wall_until = self.began + asked.limits.wall_seconds
        """By a clock that stops while it waits for a processor; `most_until` too."""
        self.most_until = self.began + asked.limits.most_seconds
        self.patience_until = self.began + PATIENCE * asked.limits.wall_seconds
        self.pid: int | None = None
        self.compiled = False
        self.stdout, self.stderr = bytearray(), bytearray()
        self.verdict: Exit | None = None
        """Why we ended it, if we did."""
        self.condemned: float | None = None
        """When we requested its end, if we did."""
        self.starved = self.overflowed = self.broken = False
        self.output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.errors, errors = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for end in (output, errors):
            os.set_blocking(end, True)
        self.channel = MessageStream()
        self.given = [readable(asked.stdin), output, errors, self.channel.theirs.detach()]
        """Descriptors for the process: input, output, errors, channel."""
        self.send(asked.source.encode("utf-8", "surrogatepass"))

    def allow(self, cpu_seconds: float) -> None:
        self.cpu_until = min(self.cpu_seconds() + cpu_seconds, self.asked.limits.cpu_seconds)
        now, more = time.monotonic(), replace(self.asked.limits, cpu_seconds=cpu_seconds).wall_seconds
        self.wall_until = min(now - self.waited_seconds() + more, self.most_until)
        self.patience_until = now + PATIENCE * more

    def rest(self) -> None:
        self.wall_until = self.most_until
        self.patience_until = self.began + PATIENCE * self.asked.limits.most_seconds

    def end(self, why: Exit = Exit.ENDED) -> None:
        self.on_end(self, why)

    def send(self, payload: bytes) -> None:
        self.channel.send(payload)

    def read_channel(self) -> bool:
        """Read what it sent and pass complete messages on; False at the end."""
        try:
            for payload in self.channel.messages():
                self.take(payload)
        except ChannelClosed as closed:
            self.broken |= isinstance(closed, MessageTooLong)
            return False
        return True

    def take(self, payload: bytes) -> None:
        """One message: first the sandbox's own, then those of the program's side."""
        if self.condemned is not None:  # ended, and still sending
            return
        if not self.compiled:
            self.compiled = payload == b'["compiled"]'
        else:
            self.on_message(self, payload)

    def read_output(self) -> bool:
        """Read standard output up to the limit; False at the end, or beyond it."""
        part = read_pipe(self.output)
        if part is None:
            return True
        room = self.asked.limits.output_bytes - len(self.stdout)
        self.stdout += part[:room]
        self.overflowed = self.overflowed or len(part) > room
        return bool(part) and not self.overflowed

    def read_errors(self) -> bool:
        """Read standard error and drop what is beyond the limit; False at the end."""
        part = read_pipe(self.errors)
        if part is None:
            return True
        self.stderr += part[: max(0, self.asked.limits.error_bytes - len(self.stderr))]
        return bool(part)

    def cpu_seconds(self) -> float:
        """Processor time so far, from the kernel's clock of that process; 0 before it runs and after it ends."""
        if self.pid is None:
            return 0.0
        try:
            return time.clock_gettime((~self.pid << 3) | 2)  # CPUCLOCK_SCHED of a process
        except OSError:
            return 0.0

    def threads(self) -> int:
        """How many it has now, by their folders in /proc; 0 where that cannot be seen."""
        try:
            return os.stat(f"/proc/{self.pid}/task").st_nlink - 2
        except OSError:
            return 0

    def over_limit(self, now: float) -> Exit | None:
        if self.overflowed:
            return Exit.OUTPUT_LIMIT
        if self.broken:  # what comes over the channel is not a message
            return Exit.ENDED
        if self.threads() > self.asked.limits.threads:
            return Exit.THREAD_LIMIT
        if self.cpu_seconds() > self.cpu_until:
            return Exit.CPU_LIMIT
        if now - self.waited_seconds() > self.wall_until:
            return Exit.WALL_LIMIT
        self.starved = now > self.patience_until
        return Exit.WALL_LIMIT if self.starved else None

    def waited_seconds(self) -> float:
        self.waits.look(self.pid, time.monotonic())
        return self.waits.total

    def concluded(self, status: int, cpu_seconds: float, memory_bytes: int) -> Execution:
        """What became of it, with what it left in its pipes.

        Not up to their end: without a sandbox a process may leave others behind that hold them open.
        """
        for take in (self.read_channel, self.read_output, self.read_errors):
            for _ in range(LAST_READS):
                if not take():
                    break
        signalled = os.WIFSIGNALED(status)
        number = os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status)
        end = self.verdict or (Exit.SIGNALLED if signalled else Exit.FINISHED)
        if not self.compiled and not signalled and number == NOT_SEALED:
            end = Exit.LOST
        elif self.overflowed:
            end = Exit.OUTPUT_LIMIT
        elif cpu_seconds > self.asked.limits.cpu_seconds:
            end = Exit.CPU_LIMIT
        return self.execution(end, number, cpu_seconds, memory_bytes)

    def execution(self, end: Exit, status: int = 0, cpu_seconds: float = 0.0, memory_bytes: int = 0) -> Execution:
        return Execution(
            exit=end,
            status=status,
            stdout=bytes(self.stdout),
            stderr=bytes(self.stderr),
            cpu_seconds=cpu_seconds,
            wall_seconds=time.monotonic() - self.began,
            memory_bytes=memory_bytes,
            compiled=self.compiled,
            most=end is Exit.WALL_LIMIT and self.wall_until >= self.most_until,
            starved=self.starved and end is Exit.WALL_LIMIT,
            waited_seconds=self.waits.total,
        )

    def close(self) -> None:
        for descriptor in (*self.given, self.output, self.errors):
            os.close(descriptor)
        self.given = []
        self.channel.close()


def readable(content: bytes) -> int:
    """A descriptor that gives this content and then its end."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    if len(content) <= PIPE_BYTES:  # less than what any pipe holds, so that writing cannot block
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.write(writer, content)
        os.close(writer)
        return reader
    writer = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        with open(writer, "wb", closefd=False) as file:
            file.write(content)
        return os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writer)


def read_pipe(descriptor: int) -> bytes | None:
    """The content so far: empty at the end, None where there is nothing yet."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
