"""A group of processes that are started, awaited, watched and stopped together.

Each has its own log file and process group.  The first one that fails is reported, with the end of its log.
"""

import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from posttrain.commands.arguments import INTERRUPTED
from posttrain.errors import RunError, UserError
from posttrain.runs.files import no_link

LOOK_SECONDS = 0.2
"""How often processes are checked."""
ANSWER_SECONDS = 5.0
"""Timeout of one request to /health."""
LAST_LINES = 15
"""Lines of a log that a message quotes."""

POSTTRAIN = (sys.executable, "-m", "posttrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedProcess:
    """A process to start."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of this process."""
    health: str = ""
    """An address that answers 200 once the process is ready; "" if nothing waits for it."""

    @property
    def typed(self) -> str:
        """The command as typed in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        own = self.command[: len(POSTTRAIN)] == POSTTRAIN
        words = ["posttrain", *self.command[len(POSTTRAIN) :]] if own else self.command
        return " ".join([*variables, shlex.join(words)])


LIBC = ctypes.PyDLL(None)
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end this process, a child, when its parent is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


class RunningProcess:
    """A started process."""

    def __init__(self, process: PlacedProcess, log: Path) -> None:
        self.process, self.log = process, log
        with open(log, "ab", opener=no_link) as output:
            self.began_at = output.tell()
            try:
                self.handle = subprocess.Popen(
                    process.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **process.environment},
                    start_new_session=True,
                    preexec_fn=end_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                remedy = "Install it, or set the command of this process in `placement`."
                raise UserError(f"{process.name}: {process.command[0]}: {error.strerror}.  {remedy}") from error

    @property
    def exit_code(self) -> int | None:
        return self.handle.poll()

    def failure(self, what: str) -> RunError:
        said = self.log.read_bytes()[self.began_at :].decode("utf-8", errors="replace").strip().splitlines()
        lines = "".join(f"\n    | {line[:300]}" for line in said[-LAST_LINES:])
        return RunError(f"{self.process.name}: {what}.  The end of {self.log}:{lines or ' it is empty'}")

    def ended(self) -> str:
        code = self.exit_code
        assert code is not None
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def stop(self, seconds: float) -> None:
        """Stop the process and its children: first with a signal, then by force."""
        if self.exit_code is None:
            self.handle.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self.handle.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.handle.pid, signal.SIGKILL)
        self.handle.wait()


@contextmanager
def started(processes: Sequence[PlacedProcess], logs: Path, *, stop_seconds: float) -> Iterator[list[RunningProcess]]:
    """Start processes in order; at the end, stop all of them in reverse order."""
    logs.mkdir(parents=True, exist_ok=True)
    running: list[RunningProcess] = []
    try:
        for each in processes:
            running.append(RunningProcess(each, logs / f"{each.name}.log"))
        yield running
    finally:
        for one in reversed(running):
            one.stop(stop_seconds)


def wait_until_ready(running: Sequence[RunningProcess], seconds: float) -> None:
    """Wait until every process with a health address answers.  Raises RunError for the first failure."""
    waiting, until = [each for each in running if each.process.health], time.monotonic() + seconds
    while waiting:
        if gone := next((each for each in running if each.exit_code is not None), None):
            raise gone.failure(gone.ended())
        waiting = [each for each in waiting if not is_healthy(each.process.health)]
        if waiting and time.monotonic() > until:
            raise waiting[0].failure(f"did not answer {waiting[0].process.health} within {seconds:g} seconds")
        time.sleep(LOOK_SECONDS if waiting else 0)


def require_free_addresses(processes: Sequence[PlacedProcess]) -> None:
    """Reject addresses where something already answers: it would be mistaken for one of the processes."""
    for each in processes:
        if each.health and is_healthy(each.health):
            rule = "Stop it, or change the port in `placement`"
            raise UserError(f"{each.name}: something already answers at {each.health}.  {rule}.")


def is_of_this_machine(host: str) -> bool:
    """Whether a process on this machine can listen on a host's address; False for an unknown name."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as one:
            one.bind(address)
            return True
    return False


def is_healthy(address: str) -> bool:
    """Whether a server answers 200 at this address, without a proxy."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(address, timeout=ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


def show_until_end(trainer: RunningProcess, servers: Sequence[RunningProcess]) -> int:
    """Print the trainer's output until it ends; returns its exit code.

    Raises RunError if it failed.  The message names the first server that stopped before, if any: the trainer can
    continue without some of its servers, and reports it.
    """
    lost: list[RunningProcess] = []
    with open(trainer.log, encoding="utf-8", errors="replace", newline="") as said:
        said.seek(trainer.began_at)
        while True:
            code = trainer.exit_code  # before the last look at what it said
            sys.stdout.write(said.read())
            sys.stdout.flush()
            if code is not None:
                break
            lost += [each for each in servers if each.exit_code is not None and each not in lost]
            time.sleep(LOOK_SECONDS)
    if code in (0, INTERRUPTED):
        return code
    raise lost[0].failure(f"{lost[0].ended()}, before the trainer failed") if lost else trainer.failure(trainer.ended())
