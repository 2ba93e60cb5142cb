"""The text of one run elsewhere, and the execution that its end shows."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

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
    """Of hashes and random numbers, for programs that run again."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended."""

    status: int
    """Exit status; negative or above 128 for a signal."""
    stdout: bytes
    stderr: bytes
    wall_seconds: float
    cpu_seconds: float = 0.0
    """0 where the place does not report it."""
    stopped: Exit | None = None
    """Why the place ended it, if it did."""
    starved: bool = False
    """It waited too long for a processor, if the place reports it."""
    waited_seconds: float = 0.0
    """For a processor; 0 where the place does not tell."""


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


def execution_of(run: ReplayRun, ended: RunEnd) -> Execution:
    """The execution that a run's end shows."""
    before, ready, stderr = ended.stderr.partition(run.mark.encode() + b" ready\n")
    if not ready:
        stderr = before
    compiled = bool(ready) and stderr.startswith(run.mark.encode() + b" compiled\n")
    if compiled:
        stderr = stderr.partition(b"\n")[2]
    signalled = ended.status < 0 or ended.status > 128
    if ended.stopped is not None and (ready or ended.stopped is Exit.LOST):
        end = ended.stopped
    elif not ready:  # it never ran: the place's fault
        end = Exit.LOST
    elif len(ended.stdout) > run.limits.output_bytes:
        end = Exit.OUTPUT_LIMIT
    elif ended.status in CPU_SIGNALS or ended.cpu_seconds > run.limits.cpu_seconds + START_CPU_SECONDS:
        end = Exit.CPU_LIMIT
    else:
        end = Exit.SIGNALLED if signalled else Exit.FINISHED
    return Execution(
        exit=end,
        status=ended.status,
        stdout=ended.stdout[: run.limits.output_bytes],
        stderr=stderr[: run.limits.error_bytes],
        cpu_seconds=max(0.0, ended.cpu_seconds - START_CPU_SECONDS),
        wall_seconds=ended.wall_seconds,
        memory_bytes=0,
        compiled=compiled,
        most=end is Exit.WALL_LIMIT and run.limits.wall_seconds >= run.limits.most_seconds,
        starved=ended.starved,
        waited_seconds=ended.waited_seconds,
    )
