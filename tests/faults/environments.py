"""A server of an environment in a process of its own, and runs that talk to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.phases import phase_recipe
from tests.support.accidents import Accident
from tests.support.openenv_server import EchoServer
from tests.support.runs import NO_ACCIDENT, Command, forked

REPLY_SECONDS = 15.0
"""environment.seconds of these runs."""
TALK = """
from posttrain.environments.openenv import OpenEnvEnvironment

class Talk(OpenEnvEnvironment):
    stop_texts = tuple("aeiou 0123456789")  # a random model seldom ends its turn
"""


@dataclass
class EnvironmentServer:
    """A server that can be killed, stopped and started anew at the same address."""

    folder: Path
    command: Command
    port: int

    @classmethod
    def started(cls, folder: Path, accident: Accident = NO_ACCIDENT, port: int = 0) -> "EnvironmentServer":
        folder.mkdir(parents=True, exist_ok=True)
        said = folder / "port"
        said.unlink(missing_ok=True)
        command = forked(partial(serve_echo, port, said), folder=folder, accident=accident, logs=folder)
        command.wait_until(said.exists, 60)
        return cls(folder, command, int(said.read_text()))

    def send(self, number: int) -> None:
        if self.command.process.is_alive():
            self.command.signal(number)

    def kill(self) -> None:
        self.command.process.kill()
        self.command.process.join(10)

    def restart(self) -> None:
        self.kill()
        self.command = EnvironmentServer.started(self.folder, port=self.port).command


def serve_echo(port: int, said: Path) -> None:
    """In the new process."""
    server = EchoServer(port=port)
    aside = said.with_suffix(".new")
    aside.write_text(server.url.rpartition(":")[2].removesuffix("/ws"))
    aside.rename(said)
    server.thread.join()


@contextmanager
def environment_server(folder: Path, accident: Accident = NO_ACCIDENT) -> Iterator[EnvironmentServer]:
    server = EnvironmentServer.started(folder, accident)
    try:
        yield server
    finally:
        server.kill()


def talking_recipe(folder: Path, server: EnvironmentServer, **sections: Any) -> Path:
    """Three steps whose completions have up to three turns."""
    folder.mkdir(exist_ok=True)
    (folder / "talk.py").write_text(TALK)
    options = {"url": f"ws://127.0.0.1:{server.port}/ws", "seconds": REPLY_SECONDS}
    environment = {"path": f"{folder}/talk.py:Talk", "options": options, "seconds": REPLY_SECONDS, "workers": 16}
    rollout = {"max_completion_tokens": 8, "max_turns": 3}
    return phase_recipe(folder, environment=environment, rollout=rollout, **sections)
