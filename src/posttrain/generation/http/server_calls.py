"""Calls to one inference server: each has a deadline, and each fault names the server, the phase and what it said."""

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from posttrain.errors import RunError, UserError
from posttrain.generation.rl_protocol import GENERATE, OWNER_HEADER, read
from posttrain.options.rollout import HttpOptions, HttpSeconds

if TYPE_CHECKING:
    import httpx

Result = TypeVar("Result")
Record = TypeVar("Record")

MOST_ANSWER_BYTES = 16 << 20
"""Largest answer without completions: a hostile server must not fill the memory."""
MOST_SAID = 300
"""Characters of a server's own words in a message."""
CHUNK_BYTES = 1 << 20


class ServerFault(RunError):
    """A call to a server failed: the server is dead, hangs, or answers something else."""

    def __init__(self, url: str, phase: str, fault: str, *, status: int | None = None, said: str = "") -> None:
        super().__init__(f"engine http: {url}: {phase}: {fault}" + ("" if fault.endswith(".") else "."))
        self.phase, self.status, self.said = phase, status, said


class EventLoop:
    """An asyncio loop in a thread, where all calls to servers run."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, which is cancelled if the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Have a function called there soon; calls keep their order."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


class ServerCalls:
    """The connection to one server; used only in its loop's thread."""

    def __init__(self, url: str, seconds: HttpSeconds, key: str) -> None:
        self.url, self.seconds, self.key = url.rstrip("/"), seconds, key
        self.owner = ""
        """The name of the caller, percent-encoded."""
        self._client: httpx.AsyncClient | None = None

    async def ask(
        self,
        phase: str,
        path: str,
        body: bytes | Path | None = None,
        *,
        seconds: float,
        most_bytes: int = MOST_ANSWER_BYTES,
    ) -> bytes:
        """The body of the answer to GET, to POST with a body, or to PUT with a file.

        Raises ServerFault if there is none in time, it is larger than `most_bytes`, or its status is not 2xx.
        """
        import httpx

        try:
            async with asyncio.timeout(seconds):
                status, answer = await self._exchange(path, body, most_bytes)
        except TimeoutError:
            raise ServerFault(self.url, phase, f"no answer in {seconds:g} seconds") from None
        except httpx.ConnectTimeout:
            raise ServerFault(self.url, phase, f"no connection in {self.seconds.connect:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerFault(self.url, phase, f"{error or type(error).__name__}") from error
        if not 200 <= status < 300:
            said = words_of(answer)
            raise ServerFault(self.url, phase, f"status {status}: {said or 'no text'}", status=status, said=said)
        return answer

    async def ask_for(
        self,
        record: type[Record],
        phase: str,
        path: str,
        body: bytes | None = None,
        *,
        seconds: float,
        most_bytes: int = MOST_ANSWER_BYTES,
    ) -> Record:
        """The record in an answer.  Raises ServerFault if it is not one."""
        answer = await self.ask(phase, path, body, seconds=seconds, most_bytes=most_bytes)
        try:
            return read(record, answer)
        except ValidationError as error:
            first = error.errors()[0]
            place = one_line(".".join(map(str, first["loc"])), 80) or "the whole"
            fault = f"an answer that is not a {record.__name__} ({place}: {first['msg']})"
            raise ServerFault(self.url, phase, fault, said=words_of(answer)) from None

    async def _exchange(self, path: str, body: bytes | Path | None, most_bytes: int) -> tuple[int, bytes]:
        method = "GET" if body is None else "PUT" if isinstance(body, Path) else "POST"
        content = file_chunks(body) if isinstance(body, Path) else body
        headers = {"Content-Type": "application/json"} if isinstance(body, bytes) else {}
        if isinstance(body, Path):
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(body.stat().st_size)}
        if self.owner:
            headers[OWNER_HEADER] = self.owner
        if path != GENERATE:  # a server may close the connection of a call that failed, after its answer
            headers["Connection"] = "close"
        async with self._opened().stream(method, self.url + path, content=content, headers=headers) as response:
            parts, size = [], 0
            async for part in response.aiter_raw():
                size += len(part)
                if size > most_bytes:
                    raise ServerFault(self.url, path, f"an answer of more than {most_bytes:,} bytes")
                parts.append(part)
            return response.status_code, b"".join(parts)

    def _opened(self) -> "httpx.AsyncClient":
        if self._client is None:
            import httpx

            headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(None, connect=self.seconds.connect),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=False,
            )
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def file_chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def words_of(answer: bytes) -> str:
    """What a server says in an error, on one line and without control characters."""
    text = answer[: 16 * MOST_SAID].decode("utf-8", errors="replace")
    content = json_in(answer)
    while isinstance(content, dict):
        content = next((content[name] for name in ("error", "message", "detail") if name in content), None)
    said = content if isinstance(content, str) else text
    return one_line(said, MOST_SAID)


def one_line(text: str, most: int) -> str:
    """The first characters of a text, without those that move a terminal's cursor."""
    return " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * most]).split())[:most]


def json_in(answer: bytes) -> object:
    """The content of an answer in JSON; None if it is not JSON, or nested too deep to be read."""
    try:
        content: object = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return content


def key_of(options: HttpOptions) -> str:
    """The key for servers, or "".  No message shows it."""
    found = os.environ.get(options.key_env, "").strip()
    if not re.fullmatch(r"[!-~]*", found):
        raise UserError(f"engine.key_env = {options.key_env}: its value is not a key of visible ASCII characters.")
    return found


def require_httpx() -> None:
    """Raise UserError if the extra `serve` is not installed."""
    from importlib.util import find_spec

    if find_spec("httpx") is None:
        raise UserError("engine http: httpx is not installed.  Run `pip install 'posttrain[serve]'`.")
