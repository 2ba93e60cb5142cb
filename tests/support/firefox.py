"""A headless Firefox that a test drives through WebDriver BiDi: messages of JSON over one WebSocket.

https://www.w3.org/TR/webdriver-bidi/
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FIREFOX_VARIABLE = "POSTTRAIN_FIREFOX"
"""Names a program, where it has none of the names below or lies elsewhere."""
FIREFOX_NAMES = ("firefox", "firefox-esr")
START_SECONDS = 60.0
WAIT_SECONDS = 30.0


def firefox() -> str | None:
    """The program, if there is one."""
    named = os.environ.get(FIREFOX_VARIABLE)
    return named or next((path for name in FIREFOX_NAMES if (path := shutil.which(name))), None)


class FirefoxWindow:
    """One page in Firefox."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0
        self.requests: list[str] = []
        """The address of each request that the page has made."""
        self.said: list[str] = []
        """Errors and warnings of scripts."""
        self.send("session.new", capabilities={})
        self.send("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self._context = self.send("browsingContext.getTree")["contexts"][0]["context"]

    def open(self, address: str, *, width: int = 1200, height: int = 800) -> None:
        """Load a page in a window of this size."""
        size = {"width": width, "height": height}
        self.send("browsingContext.setViewport", context=self._context, viewport=size)
        self.send("browsingContext.navigate", context=self._context, url="about:blank", wait="complete")
        self.send("browsingContext.navigate", context=self._context, url=address, wait="complete")

    def run(self, program: str) -> Any:
        """The value of an expression in the page: text, number, truth value or null."""
        where = {"context": self._context}
        answer = self.send("script.evaluate", expression=program, target=where, awaitPromise=True)
        assert answer["type"] == "success", answer
        return answer["result"].get("value")

    def until(self, program: str) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := self.run(program)):
            assert time.monotonic() < deadline, f"never: {program}; {self.said}"
            time.sleep(0.02)
        return found

    def press(self, key: str) -> None:
        """A key, down and up."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self.send("input.performActions", context=self._context, actions=[keyboard])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; events that come meanwhile are noted."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=WAIT_SECONDS))
            if message.get("id") == self._number:
                assert message["type"] == "success", message
                found: dict[str, Any] = message["result"]
                return found
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "network.beforeRequestSent":
                self.requests.append(event["params"]["request"]["url"])
            case "log.entryAdded" if event["params"]["level"] in ("error", "warn"):
                self.said.append(str(event["params"]["text"])[:500])


@contextmanager
def firefox_window(program: str, profile: Path) -> Iterator[FirefoxWindow]:
    """A browser with a profile of its own, ended when it is left."""
    log = profile / "firefox.log"
    flags = ["--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
    with log.open("wb") as stream:
        process = subprocess.Popen([program, *flags, "about:blank"], stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"BiDi listening on (ws://\S+)", log.read_text(errors="replace"))):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, f"{program} does not listen: {log.read_text(errors='replace')}"
            time.sleep(0.05)
        with connect(f"{found[1]}/session", max_size=None) as connection:
            yield FirefoxWindow(connection)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
