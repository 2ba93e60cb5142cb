"""A small server of OpenEnv's wire protocol: an echo that counts its steps, with failures to order.

python tests/support/openenv_server.py HOST PORT
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

STEPS = 3
"""Steps of an episode."""


class EchoServer:
    """Counts what it was asked; `message` of a step may be "break", "garbage", "close" or "hang".

    Each request raises an audit event, so that accidents can happen to a process at one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.sessions = 0
        self.closed = threading.Event()
        self.dies_at_step = 0
        """The step at which every second session breaks off; 0 for none."""
        self.server: Server = serve(self.talk, host, port, process_request=health)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.server.socket.getsockname()[1]}/ws"

    def talk(self, connection: ServerConnection) -> None:
        self.sessions += 1
        steps, dies_at = 0, self.dies_at_step if self.sessions % 2 else 0
        for text in connection:
            message = json.loads(text)
            sys.audit("openenv", message["type"])
            self.asked.append(message)
            if message["type"] == "close":
                self.closed.set()
                break
            said = message["data"].get("message", "")
            if said == "close" or (message["type"] == "step" and steps + 1 == dies_at):
                connection.close()
                break
            if said == "hang":
                self.closed.wait(5)
            elif said == "garbage":
                connection.send("not JSON")
            elif said == "break":
                connection.send(json.dumps({"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}}))
            else:
                steps += message["type"] == "step"
                seen = {"echoed_message": f"You said {said[:8]!r}." if steps else "Say something.", "steps": steps}
                answer = {"observation": seen, "reward": steps / 10 if steps else None, "done": steps == STEPS}
                connection.send(json.dumps({"type": "observation", "data": answer}))

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()


def health(connection: ServerConnection, request: Request) -> Response | None:
    """The answer to a request that does not open a WebSocket."""
    return connection.respond(HTTPStatus.OK, "healthy\n") if request.path == "/health" else None


@contextmanager
def echo_server() -> Iterator[EchoServer]:
    server = EchoServer()
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    EchoServer(sys.argv[1], int(sys.argv[2])).thread.join()
