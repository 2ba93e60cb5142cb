"""Servers of `posttrain serve --rl` in processes of their own, each behind a proxy, and runs that sample from them."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.faulty_proxy import FaultyProxy, faulty_proxy
from tests.support.runs import Command, start

UPDATE_SECONDS, SAMPLE_SECONDS, CONNECT_SECONDS = 6.0, 4.0, 3.0
"""Deadlines of the runs here."""


@dataclass
class Server:
    """A server that can be killed, stopped and started anew at the same address."""

    model: Path
    folder: Path
    command: Command
    port: int = 0

    @classmethod
    def started(cls, model: Path, folder: Path, port: int = 0) -> "Server":
        folder.mkdir(parents=True, exist_ok=True)
        server = cls(model, folder, begun(model, folder, port))
        server.port = server.listening_port()
        return server

    def listening_port(self) -> int:
        found: list[str] = []

        def listens() -> bool:
            if not self.command.log.exists():
                return False
            found[:] = re.findall(r"http://127\.0\.0\.1:(\d+)/", self.command.log.read_text())
            return bool(found)

        self.command.wait_until(listens, 120)
        return int(found[-1])

    def send(self, number: int) -> None:
        pid = self.command.process.pid
        assert pid is not None
        if self.command.process.is_alive():
            os.kill(pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.command.process.join(10)

    def restart(self) -> None:
        """Start it again, with the weights of the folder that it was first started with."""
        self.command = begun(self.model, self.folder, self.port)
        self.listening_port()


def begun(model: Path, folder: Path, port: int) -> Command:
    return start("serve", model, "--rl", "--port", port, folder=folder)


@contextmanager
def servers(model: Path, folder: Path, count: int) -> Iterator[tuple[list[Server], list[FaultyProxy]]]:
    """Servers, and a proxy before each."""
    with ExitStack() as opened:
        started = [Server.started(model, folder / f"server-{number}") for number in range(count)]
        for each in started:
            opened.callback(each.kill)
            opened.callback(each.send, signal.SIGCONT)
        proxies = [opened.enter_context(faulty_proxy("127.0.0.1", each.port)) for each in started]
        yield started, proxies


def http_section(proxies: Sequence[FaultyProxy]) -> dict[str, Any]:
    """The section `engine` of a run that samples from them."""
    seconds = {"connect": CONNECT_SECONDS, "sample": SAMPLE_SECONDS, "update": UPDATE_SECONDS}
    return {"name": "http", "urls": [each.url for each in proxies], "seconds": seconds}
