"""Hosts on this machine: each has a network, a name and a file of hosts of its own, and a cable to one switch.

    with hosts("node-0", "node-1") as (first, second):
        first.type("ping -c 1 node-1", folder, log=folder / "ping.log")
        second.unplug()

They need root on Linux.  All that runs on a host is killed at the end, and a network ends with its last process.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.runs import NO_ACCIDENT, NOTHING, Command, forked, run_command

INTERFACE = "eth0"
"""The network interface of every host, as GLOO_SOCKET_IFNAME names it."""
SPACES = ("net", "uts", "mnt")
HOST = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && ip link set lo up && echo && exec cat'
SWITCH = "ip link add switch type bridge && ip link set switch up && echo && exec cat"
LIBC = ctypes.CDLL(None, use_errno=True)


def refusal() -> str:
    """Why this machine allows no hosts; "" where it does."""
    try:
        made = subprocess.run(["unshare", "--net", "--uts", "--mount", "ip", "link"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return made.stderr.strip()


REFUSAL = refusal()
needs_hosts = pytest.mark.skipif(bool(REFUSAL), reason=f"network namespaces are not allowed here: {REFUSAL}")


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    holder: int
    """The process whose spaces are the host's."""
    switch: int
    """The process that holds the switch."""

    def type(
        self, text: str, folder: Path, *, log: Path, environment: Mapping[str, str] = NOTHING
    ) -> "subprocess.Popen[bytes]":
        """Begin what is typed into a shell there, in a folder; the shell leads a process group."""
        path = f"{Path(sys.executable).parent}:{environment.get('PATH', os.environ['PATH'])}"
        with open(log, "ab") as output:
            return subprocess.Popen(
                [*in_spaces_of(self.holder), "bash", "-c", f'cd "{folder}"; {text}'],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **environment, "PATH": path},
                start_new_session=True,
            )

    def start(
        self,
        *argv: object,
        folder: Path,
        environment: Mapping[str, str] = NOTHING,
        before: Callable[[], None] | None = None,
    ) -> Command:
        """Begin `posttrain ARGV` there, as `runs.start` does; `before` is called in the new process."""
        (logs := folder / self.name).mkdir(exist_ok=True)
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, **environment}
        run = partial(run_command, [str(each) for each in argv], pictures=False, environment=variables)
        work = partial(run_inside, self.holder, folder, before, run)
        return forked(work, folder=folder, accident=NO_ACCIDENT, logs=logs)

    def processes(self) -> list[int]:
        """All that run there, but the holder."""
        return [each for each in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self.has(each)]

    def has(self, process: int) -> bool:
        try:
            return process != self.holder and net_of(process) == net_of(self.holder)
        except OSError:  # it has ended, or is a zombie
            return False

    def unplug(self) -> None:
        """Pull the cable."""
        ip("link", "set", self.name, "down", inside=self.switch)

    def plug(self) -> None:
        ip("link", "set", self.name, "up", inside=self.switch)

    def kill_all(self) -> None:
        """As a host that loses its power."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def net_of(process: int) -> str:
    return os.readlink(f"/proc/{process}/ns/net")


def in_spaces_of(process: int) -> list[str]:
    """The words before a command that runs in the spaces of a process."""
    return ["nsenter", f"--target={process}", "--net", "--uts", "--mount", "--"]


def run_inside(holder: int, folder: Path, before: Callable[[], None] | None, work: Callable[[], int]) -> int:
    """Work in the spaces of a process, which this one enters."""
    for space in SPACES:
        with open(f"/proc/{holder}/ns/{space}") as entry:
            if LIBC.setns(entry.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {entry.name}")
    os.chdir(folder)
    if before is not None:
        before()
    return work()


def ip(*words: str, inside: int) -> None:
    subprocess.run([*in_spaces_of(inside), "ip", *words], check=True)


@contextmanager
def held(script: str, *words: str) -> Iterator[int]:
    """A process that holds new spaces, in which a script has run; it ends with the block, or with this process."""
    spaces = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, "sh", *words]
    with subprocess.Popen(spaces, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline(), "its spaces cannot be set up"
            yield holder.pid
        finally:
            holder.kill()


@contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts that know each other by name."""
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
    with ExitStack() as opened:
        file = Path(opened.enter_context(TemporaryDirectory(prefix="hosts-")), "hosts")
        known = {"localhost": "127.0.0.1", **addresses}
        file.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        switch, made = opened.enter_context(held(SWITCH)), list[Host]()
        for name, address in addresses.items():
            holder = opened.enter_context(held(HOST, name, str(file)))
            made.append(host := Host(name, address, holder, switch))
            opened.callback(host.kill_all)
            cable = ("link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder))
            ip(*cable, inside=switch)
            ip("link", "set", name, "master", "switch", inside=switch)
            ip("address", "add", f"{address}/24", "dev", INTERFACE, inside=holder)
            ip("link", "set", INTERFACE, "up", inside=holder)
            host.plug()
        yield made


@dataclass(frozen=True)
class Gate:
    """A process that calls `before` waits at one call of a method, until the test opens the gate."""

    place: Path
    """A folder for two marks."""
    module: str
    method: str
    """`Class.method`."""
    call: int = 1

    def __call__(self) -> None:
        owner, name = self.method.split(".")
        kind, left = getattr(import_module(self.module), owner), self.call
        method = getattr(kind, name)

        def waits(*given: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if not left:
                self.reached.touch()
                while not self.opened.exists():
                    time.sleep(0.01)
            return method(*given, **named)

        setattr(kind, name, waits)

    @property
    def reached(self) -> Path:
        return self.place / "gate-reached"

    @property
    def opened(self) -> Path:
        return self.place / "gate-opened"

    def open(self) -> None:
        self.opened.touch()
