"""A sandbox that runs programs in a place that keeps no process alive between messages.

Every message to a process is one more run of it: all earlier messages are sent again, and only its new answers are
taken.  A program that counts its calls works; one that draws random numbers answers as of its last run.
"""

import binascii
import queue
import secrets
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.sandbox.elsewhere import Backend, ReplayRun, execution_of, lost, replay_run
from posttrain.sandbox.execution import Conversation, Execution, Exit, Process, Sandbox
from posttrain.sandbox.inside.frames import MAX_BYTES
from posttrain.sandbox.probes import Finding, MachineBait, SandboxUnavailable, probes, require_passed

SAID_BYTES = 4 * MAX_BYTES
"""Room for the longest message of a run in base64, and for many short ones."""
MAX_RESULTS = 100_000


class RepeatedRun:
    """A process, as a series of runs."""

    def __init__(self, sandbox: "ReplaySandbox", conversation: Conversation, asked: Process) -> None:
        self.sandbox, self.conversation, self.asked = sandbox, conversation, asked
        self.messages = [asked.source.encode("utf-8", "surrogatepass")]
        self.delivered = 0
        """Its messages that have been taken."""
        self.allowed = 0.0
        self.latest = Execution(exit=Exit.LOST)
        self.waited = 0.0
        self.over = False
        self.seed = secrets.randbelow(1 << 31) if asked.kind in ("calls", "tests") else None
        """Every run draws the same numbers, so that what it did before it does again."""

    def allow(self, cpu_seconds: float) -> None:
        """A run repeats all earlier work: it may take the time of that, plus the new part."""
        before = self.latest.cpu_seconds if self.sandbox.backend.tells_cpu else self.allowed
        self.allowed = before + cpu_seconds

    def rest(self) -> None:
        """No process waits, so no clock runs."""

    def send(self, payload: bytes) -> None:
        self.messages.append(payload)
        if self in self.sandbox.alive:
            self.sandbox.to_run.append(self)

    def cpu_seconds(self) -> float:
        return self.latest.cpu_seconds

    def waited_seconds(self) -> float:
        return self.waited

    def end(self, why: Exit = Exit.ENDED) -> None:
        """It is not run again; a run that has started is ignored."""
        self.sandbox.finish(self, replace(self.latest, exit=why))

    def as_run(self, backend: Backend) -> ReplayRun:
        limits, kind = self.asked.limits, self.asked.kind
        if kind in ("calls", "tests"):
            cpu_seconds = min(self.allowed, limits.cpu_seconds) if self.allowed else limits.cpu_seconds
            limits = replace(limits, cpu_seconds=cpu_seconds, output_bytes=SAID_BYTES)
        run = ReplayRun(stdin=self.asked.stdin, limits=limits, seed=self.seed, canary=self.sandbox.canary)
        return replay_run(kind, self.messages, self.delivered, run, backend.conditions)

    def take(self, execution: Execution) -> list[bytes]:
        self.latest = execution
        self.waited += execution.waited_seconds
        if self.asked.kind not in ("calls", "tests"):
            return []
        # For calls one answer to each message is due, and one more shows that it speaks unasked.  The last line may be
        # incomplete.
        most = len(self.messages) - self.delivered + 1 if self.asked.kind == "calls" else MAX_RESULTS
        said = [message(line) for line in execution.stdout.split(b"\n", most)[:-1]]
        self.delivered += len(said)
        return said

    def waits(self, said: Sequence[bytes]) -> bool:
        """Whether the process would now wait for a message, rather than having ended."""
        waiting = said and self.latest.succeeded and (self.asked.kind == "calls" or said[-1].startswith(b'["call"'))
        return bool(waiting)


def message(line: bytes) -> bytes:
    """A line's message; a program's own output is not base64, and becomes one that the reader refuses."""
    try:
        return binascii.a2b_base64(line, strict_mode=True)
    except ValueError:
        return b""


@dataclass(frozen=True, slots=True)
class Event:
    """A run is over, or a process was ended."""

    process: RepeatedRun
    execution: Execution
    by_itself: bool


class ReplaySandbox(Sandbox):
    """A sandbox over a place that runs a text once; for one thread."""

    def __init__(
        self, backend: Backend, *, at_once: int, probed: bool = False, canary: Mapping[str, str] | None = None
    ) -> None:
        """`canary` are variables of the starting environment that programs must not see."""
        self.backend, self.at_once, self.probed, self.canary = backend, at_once, probed, canary or {}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.alive: dict[RepeatedRun, None] = {}
        self.to_run: list[RepeatedRun] = []
        self.under_way = 0
        """Runs that have not ended."""
        self.found: list[Finding] = []
        """What the probes found, once they were tried."""

    @property
    def start_seconds(self) -> float:
        return self.backend.start_seconds

    def probe(self) -> None:
        """Probe the place, once, before anything else is run there.  Raises SandboxUnavailable."""
        if self.probed:
            return
        trusted = ReplaySandbox(self.backend, at_once=self.at_once, probed=True)
        (first,) = trusted.run([Process(kind="program", source="print(1)")])
        if first.exit is Exit.LOST:
            reason = first.stderr.decode("utf-8", "replace").strip()[-1000:]
            raise SandboxUnavailable(
                f"sandbox: {self.backend.name} does not work: {reason}\n  Remedy: {self.backend.remedy}."
            )
        with MachineBait() as bait:
            tried = probes(bait, self.backend)
            baited = ReplaySandbox(self.backend, at_once=self.at_once, probed=True, canary=bait.canary)
            executions = baited.run(Process(kind="program", source=each.source, limits=each.limits) for each in tried)
        self.found = [Finding(each, execution) for each, execution in zip(tried, executions, strict=True)]
        require_passed(self.found)
        self.probed = True

    def converse(self, conversations: Sequence[Conversation]) -> None:
        self.probe()
        waiting = deque(conversations)
        try:
            while waiting or self.alive:
                while waiting and len({id(each.conversation) for each in self.alive}) < self.at_once:
                    waiting.popleft().begin(self)
                for process in self.to_run:
                    arguments = (process, process.as_run(self.backend), self.events)
                    threading.Thread(target=self.run_once, args=arguments, daemon=True).start()
                    self.under_way += 1
                self.to_run.clear()
                if not self.under_way and self.events.empty():  # every process waits for another: all have failed
                    for process in self.alive:
                        self.finish(process, replace(process.latest, exit=Exit.LOST))
                if self.alive:
                    event = self.events.get()
                    self.under_way -= event.by_itself
                    self.hear(event)
        except BaseException:
            self.close()  # nothing keeps running after an interrupt
            raise

    def start(self, conversation: Conversation, asked: Process) -> RepeatedRun:
        process = RepeatedRun(self, conversation, asked)
        self.alive[process] = None
        self.to_run.append(process)
        return process

    def finish(self, process: RepeatedRun, execution: Execution) -> None:
        if process in self.alive and not process.over:
            process.over = True
            self.events.put(Event(process, execution, by_itself=False))

    def run_once(self, process: RepeatedRun, made: ReplayRun, events: "queue.SimpleQueue[Event]") -> None:
        try:
            ended = self.backend.run(made)
        # Any error at all: without an event `converse` would never return, and it is never the program's fault.
        except Exception as error:  # noqa: BLE001
            ended = lost(f"{type(error).__name__}: {error}", 0.0)
        events.put(Event(process, execution_of(made, ended), by_itself=True))

    def hear(self, event: Event) -> None:
        process, conversation = event.process, event.process.conversation
        if process not in self.alive:  # it was ended during this run
            return
        waits = False
        if event.by_itself:
            said = process.take(event.execution)
            waits = process.waits(said)
            for payload in said:
                if not process.over:
                    conversation.message(self, process, payload)
        if process.over and event.by_itself:  # what was said ended it: that event is on its way
            return
        if not waits:
            del self.alive[process]
            conversation.ended(self, process, event.execution)

    def close(self) -> None:
        """End everything; later ends of runs in progress are ignored."""
        self.alive.clear()
        self.to_run.clear()
        self.under_way = 0
        self.events = queue.SimpleQueue()
        self.backend.stop()
