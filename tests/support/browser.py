"""A headless Chromium that a test drives through a pair of pipes, with nothing but the standard library.

Its DevTools protocol over `--remote-debugging-pipe`: messages of JSON, each with a zero byte behind it, which it reads
from descriptor 3 and writes to descriptor 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "POSTTRAIN_CHROMIUM"
"""Names a program, where it has none of the names below or lies elsewhere."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell", "chrome")
SECONDS = 30.0
KEY_CODES = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Backspace": (8, ""),
    "Tab": (9, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}
"""Keys that are not characters: their code, and the text that they type."""
LAUNCHER = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Gives the pipes the numbers that the browser looks at, and becomes the browser."""


def chromium() -> str | None:
    """The program, if there is one."""
    named = os.environ.get(VARIABLE)
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._number, self._buffer = 0, b""
        self._session: str | None = None
        self._target: str | None = None
        self.requests: list[str] = []
        """The address of each request that the page has made."""
        self.said: list[str] = []
        """What went wrong in it: exceptions, and messages of the browser's."""

    def open(self, address: str, *, width: int = 1200, height: int = 800) -> None:
        """Load a page in a window of this size, in place of the one before."""
        self._session, before = None, self._target
        self._target = target = self.send("Target.createTarget", url="about:blank")["targetId"]
        if before:
            self.send("Target.closeTarget", targetId=before)
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=address)
        self.until("/^(http|file)/.test(location.protocol) && document.readyState === 'complete'")

    def enter_frame(self) -> None:
        """Go on inside the page's frame, which has a process of its own."""
        self.until("!!document.querySelector('iframe')")
        deadline = time.monotonic() + SECONDS
        while True:
            targets = self.send("Target.getTargets")["targetInfos"]
            if frames := [each["targetId"] for each in targets if each.get("parentId") == self._target]:
                break
            assert time.monotonic() < deadline, "no frame has a process of its own"
            time.sleep(0.01)
        self._session = self.send("Target.attachToTarget", targetId=frames[0], flatten=True)["sessionId"]
        for domain in ("Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def run(self, program: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=program, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, program: str) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.run(program)):
            assert time.monotonic() < deadline, f"never: {program}; {self.said}"
            time.sleep(0.01)
        return found

    def press(self, key: str) -> None:
        """A key, down and up: a character, or one of KEY_CODES by its name."""
        code, text = KEY_CODES.get(key, (0, key))
        for kind in ("keyDown", "keyUp"):
            typed = text if kind == "keyDown" else ""
            self.send("Input.dispatchKeyEvent", type=kind, key=key, text=typed, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path) -> None:
        """A picture of what the window shows, as PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def colours(self, scheme: str) -> None:
        """Light or dark, as the system would ask for."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def click(self, element: str) -> None:
        """The middle of an element, by its id."""
        box = f"document.getElementById({element!r}).getBoundingClientRect()"
        x, y = self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what the browser tells meanwhile is noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.said.append(event["params"]["entry"]["text"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, "the browser says nothing"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, ended when it is left."""
    (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    flags += ["--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(its_in), str(its_out), program, *flags],
        pass_fds=(its_in, its_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(our_out, our_in)
    finally:
        os.close(our_out)  # which ends it
        os.close(our_in)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
