"""Running programs elsewhere, once: the text of a run, the execution that its end shows, and a service on the network.

`Remote` is a client of the `/run_code` protocol of SandboxFusion.  Request: {code, language, stdin, run_timeout,
compile_timeout}.  Reply: {status: Success | Failed | SandboxError, message, run_result: {status: Finished | Error |
TimeLimitExceeded, return_code, stdout, stderr, execution_time}}.
"""

import json
import math
import random
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from posttrain.sandbox import inside
from posttrain.sandbox.execution import Execution, Exit, Kind, Limits

INSIDE = Path(inside.__file__).parent
CPU_SIGNALS = (-24, 152)
"""Exit status of a process that used up its processor time (SIGXCPU), as `wait` and as shells report it."""
MODULES = ("frames", "plain", "runner")
FILE_BYTES = 64 << 20
DESCRIPTORS = 256
START_CPU_SECONDS = 0.1
"""Processor time of the interpreter's start, which is not the program's."""
PROCESSES = 32
"""Processes and threads that a program may have at a time."""
USERS = range(61184, 65000)
"""Unused users: processes are counted for each user, so runs at the same time should not share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """One program text to be run somewhere, once."""

    text: str = ""
    """Python source that needs only an interpreter, 3.10 or later."""
    stdin: bytes
    limits: Limits
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    """Begins our lines; programs cannot guess it."""
    seed: int | None = None
    """Seeds hashes and random numbers, for programs that run again."""
    canary: Mapping[str, str] = field(default_factory=dict)
    """Variables added to our environment, for a probe that looks for them in the program's."""

    @property
    def user(self) -> int:
        return USERS[int(self.mark, 16) % len(USERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a place that runs programs."""

    path: Sequence[str] = ()
    """Folders there with packages beyond the standard library."""
    gives_up_root: bool = False
    """It starts as root and becomes the run's user before the program is read."""
    processes: int = PROCESSES
    """Greatest number of processes and threads; 0 means no limit."""


def lost(reason: str, wall_seconds: float) -> Execution:
    return Execution(exit=Exit.LOST, status=-1, stderr=reason.encode("utf-8", "replace"), wall_seconds=wall_seconds)


class Backend(Protocol):
    """Somewhere that runs a text once."""

    name: str
    conditions: Conditions
    here: bool
    """Whether its programs run on this machine."""
    bounded_as_a_whole: bool
    """Whether its limits hold for a program and all that it starts together."""
    tells_cpu: bool
    """Whether it reports the processor time of a run."""
    remedy: str
    """How to fix it where a probe passes."""
    start_seconds: float
    """Time to start, beyond the program's."""

    def run(self, run: ReplayRun) -> Execution:
        """Run it, from any thread; the exit is FINISHED unless the place ended it, whatever its status is."""

    def stop(self) -> None: ...


def replay_run(
    kind: Kind, messages: Sequence[bytes], delivered: int, run: ReplayRun, conditions: Conditions
) -> ReplayRun:
    """The run with its text; `messages` are the source and those to the process, `delivered` counts its answers."""
    limits = run.limits
    job = {
        "kind": kind,
        "messages": [each.decode("latin-1") for each in messages],
        "delivered": delivered,
        "mark": run.mark,
        "seed": run.seed,
        "limits": {
            "cpu_seconds": math.ceil(limits.cpu_seconds),
            "memory_bytes": limits.memory_bytes,
            "file_bytes": FILE_BYTES,
            "descriptors": DESCRIPTORS,
            "processes": conditions.processes,
        },
        "path": list(conditions.path),
        "uid": run.user if conditions.gives_up_root else None,
    }
    modules = {name: texts()[name] for name in MODULES}
    return replace(run, text=f"{texts()['replay']}\nreplay_job({modules!a}, {job!a})\n")


@cache
def texts() -> dict[str, str]:
    return {name: (INSIDE / f"{name}.py").read_text(encoding="utf-8") for name in ("replay", *MODULES)}


def execution_of(run: ReplayRun, ended: Execution) -> Execution:
    """What a run's end shows, as the place reports it: whether it began and compiled, and why it ended."""
    before, ready, stderr = ended.stderr.partition(run.mark.encode() + b" ready\n")
    stderr = stderr if ready else before
    compiled = bool(ready) and stderr.startswith(run.mark.encode() + b" compiled\n")
    if compiled:
        stderr = stderr.partition(b"\n")[2]
    end = ended.exit
    if not ready:  # it never ran: the place's fault
        end = Exit.LOST
    elif end is not Exit.FINISHED:
        pass
    elif len(ended.stdout) > run.limits.output_bytes:
        end = Exit.OUTPUT_LIMIT
    elif ended.status in CPU_SIGNALS or ended.cpu_seconds > run.limits.cpu_seconds + START_CPU_SECONDS:
        end = Exit.CPU_LIMIT
    elif ended.status < 0 or ended.status > 128:
        end = Exit.SIGNALLED
    return replace(
        ended,
        exit=end,
        stdout=ended.stdout[: run.limits.output_bytes],
        stderr=stderr[: run.limits.error_bytes],
        cpu_seconds=max(0.0, ended.cpu_seconds - START_CPU_SECONDS),
        compiled=compiled,
        most=end is Exit.WALL_LIMIT and run.limits.wall_seconds >= run.limits.most_seconds,
    )


TRIES = 3
TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
WAIT_SECONDS = 0.5
"""Before the second try; twice that before the third."""
GRACE_SECONDS = 30.0
"""Time for queues and starting, beyond the program's."""
REPLY_BYTES = 64 << 20
READ_BYTES = 1 << 16
EARLY = 0.9
"""Share of the requested time; a program that was ended earlier met a limit of the service."""
BUSY = 2.0
"""Seconds by the clock per second of processor time, above which programs there count as starved."""
OUTPUT_KEPT = 1 << 20
"""Output that the service keeps; it drops the rest without notice."""
SPIN_SECONDS = 0.5
"""Processor time of the program that measures whether the service is busy."""
SPIN = f"""
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() < used + {SPIN_SECONDS}: pass
print(time.monotonic() - began)
"""


class Remote:
    """A service that runs programs; threads may share it."""

    conditions = Conditions(processes=0)  # who else runs there as the same user is not ours to know
    start_seconds = GRACE_SECONDS
    here, bounded_as_a_whole, tells_cpu = False, True, False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") + "/run_code"
        self.name = f"remote ({url})"
        self.remedy = (
            "programs there must not reach this machine: run the service on another one or in a container, not with"
            " `isolation: none` on a trainer's"
        )

    def stop(self) -> None:
        """Requests in progress end at their time limit."""

    def run(self, run: ReplayRun) -> Execution:
        ended = self.run_for(run.text, run.stdin.decode("utf-8", "surrogatepass"), run.limits.wall_seconds)
        return replace(ended, starved=True) if ended.exit is Exit.WALL_LIMIT and self.busy() else ended

    def run_for(self, code: str, stdin: str, seconds: float) -> Execution:
        """The end of a run that has some seconds by the clock."""
        began = time.monotonic()
        body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": seconds, "compile_timeout": seconds}
        try:
            reply = self.asked(json.dumps(body).encode(), timeout=seconds + GRACE_SECONDS)
            return read_reply(reply, time.monotonic() - began, seconds)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return lost(f"{self.name}: {type(error).__name__}: {error}", time.monotonic() - began)

    def busy(self) -> bool:
        """Whether programs wait for a processor there, measured by a program that computes for a known time.

        The service does not say why a program was late: it may have slept, which is its fault, or starved.
        """
        ended = self.run_for(SPIN, "", 10 * SPIN_SECONDS)
        try:
            return ended.status != 0 or float(ended.stdout) > BUSY * SPIN_SECONDS
        except ValueError:
            return True

    def asked(self, body: bytes, *, timeout: float) -> dict[str, Any]:
        """The service's reply.  Raises OSError or ValueError if there is none after a few tries."""
        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
        until = time.monotonic() + timeout
        for left in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=max(1.0, until - time.monotonic())) as response:
                    reply: dict[str, Any] = json.loads(read_within(response, until))
                    return reply
            except (OSError, ValueError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code not in TRY_AGAIN
                if refused or left == 0 or time.monotonic() > until:
                    raise
                time.sleep(WAIT_SECONDS * 2 ** (TRIES - 1 - left) * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")


def read_within(response: IO[bytes], until: float) -> bytes:
    """All of a reply.  Raises OSError if it is late, even if parts of it keep coming."""
    content = bytearray()
    while part := response.read1(READ_BYTES):  # type: ignore[attr-defined]  # as every HTTP response has it
        content += part
        if time.monotonic() > until or len(content) > REPLY_BYTES:
            raise OSError(f"a reply of more than {len(content):,} bytes, or later than it should be")
    return bytes(content)


def read_reply(reply: dict[str, Any], wall_seconds: float, allowed: float) -> Execution:
    """The end of a run that was allowed some seconds, as the service reports it."""
    result = reply.get("run_result")
    if reply["status"] == "SandboxError" or result is None:
        return lost(f"the service failed: {str(reply.get('message'))[:1000]}", wall_seconds)
    stdout = (result.get("stdout") or "").encode("utf-8", "surrogatepass")
    timed_out = result["status"] == "TimeLimitExceeded"
    if timed_out and (ran := result.get("execution_time")) is not None and ran < EARLY * allowed:
        return lost(
            f"the service ended it after {ran:.3g} s by a limit of the service; {allowed:.3g} s were requested", ran
        )
    return Execution(
        exit=Exit.WALL_LIMIT if timed_out else Exit.OUTPUT_LIMIT if len(stdout) >= OUTPUT_KEPT else Exit.FINISHED,
        status=-9 if timed_out else int(result["return_code"]),
        stdout=stdout,
        stderr=(result.get("stderr") or "").encode("utf-8", "surrogatepass"),
        wall_seconds=wall_seconds,
    )
