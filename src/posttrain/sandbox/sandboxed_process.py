"""One process in the sandbox, seen from outside: its messages, its output, its use of resources.

A limit by the clock is for programs that sleep or block.  A program that is ready to run and has no processor is not at
fault, so its waiting time does not count.  The kernel knows this time for each thread (`schedstat`); without it, the
machine's pressure is used instead: the time in which anything on it waited for a processor.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from posttrain.sandbox.execution import Execution, Exit, Process
from posttrain.sandbox.inside.frames import MAX_BYTES, ChannelClosed

READ_BYTES = 1 << 16


class MessageTooLong(ChannelClosed):
    """The other side announces a message that is longer than allowed."""


class MessageStream:
    """Our end of a socket pair to another process; never blocks."""

    def __init__(self, *, most: int = MAX_BYTES) -> None:
        self.most = most
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.socket, self.theirs = socket.socketpair()
        """`theirs` is the other process's end."""
        self.socket.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send a message as far as the socket takes it; `flush` sends the rest."""
        self.outgoing += len(payload).to_bytes(4, "little") + payload
        self.flush()

    def flush(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:  # the other side is closed, as reading will show
            self.outgoing.clear()

    def messages(self) -> Iterator[bytes]:
        """Read once and yield the complete messages.  Raises ChannelClosed at the end, and MessageTooLong."""
        try:
            part = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed from error
        self.incoming += part
        while len(self.incoming) >= 4:
            end = 4 + int.from_bytes(self.incoming[:4], "little")
            if end - 4 > self.most:
                raise MessageTooLong
            if len(self.incoming) < end:
                break
            payload = bytes(self.incoming[4:end])
            del self.incoming[:end]
            yield payload
        if not part:
            raise ChannelClosed

    def has_ended(self) -> bool:
        """Whether the other side has closed the socket and everything is read."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.theirs.close()
        self.socket.close()


PATIENCE = 5.0
"""A limit by the clock is at most this many times as long, however busy the machine is."""


def thread_waits(pid: int) -> dict[str, float] | None:
    """Seconds that each living thread of a process has waited; None if this cannot be read."""
    try:
        return {thread: waited_by(f"{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")}
    except (OSError, IndexError, ValueError):
        return None


def waited_by(thread: str) -> float:
    with open(f"/proc/{thread}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9  # nanoseconds that it ran and waited, and how many times


def waited_here() -> float:
    """Seconds that our own thread has waited; 0 if the kernel does not count them."""
    try:
        return waited_by("thread-self")
    except (OSError, IndexError, ValueError):
        return 0.0


class MachineWaits:
    """Seconds since its making in which anything on this machine waited for a processor."""

    def __init__(self) -> None:
        self.began, self.before = time.monotonic(), pressure_seconds()

    def seconds(self) -> float:
        """So far.  Without the kernel's count: all of them where the machine is overloaded, else none."""
        now = pressure_seconds()
        if now is None or self.before is None:
            overloaded = hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)
            return time.monotonic() - self.began if overloaded else 0.0
        return now - self.before


def pressure_seconds() -> float | None:
    try:
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, IndexError, ValueError):
        return None


class ProcessWaits:
    """How long one process has waited; read while it runs, since the count ends with it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.total = 0.0
        self.of_threads: dict[str, float] = {}
        self.machine = MachineWaits()

    def look(self, pid: int | None, now: float) -> None:
        """Add what has come since the last look: the longest wait of any thread.

        A program's own threads wait for each other, but together no longer than they compute, and that is limited.
        Before it has a process all of its time is waiting.
        """
        if pid is None:
            self.total = now - self.began
            return
        waits = thread_waits(pid)
        if waits is None:  # it has ended, or the kernel does not count
            if not self.of_threads:
                self.total = max(self.total, self.machine.seconds())
            return
        grown = max((waited - self.of_threads.get(thread, 0.0) for thread, waited in waits.items()), default=0.0)
        self.of_threads = waits
        self.total = min(self.total + max(0.0, grown), now - self.began)


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
        """On a clock that stops while it waits for a processor; `most_until` too."""
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
                if self.condemned is not None:  # ended, and still sending
                    continue
                if self.compiled:
                    self.on_message(self, payload)
                else:  # the first is the sandbox's own
                    self.compiled = payload == b'["compiled"]'
        except ChannelClosed as closed:
            self.broken |= isinstance(closed, MessageTooLong)
            return False
        return True

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

        Pipes are not read to their end: without a sandbox, other processes that it started may hold them open.
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
    """The content so far: empty at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
