"""A proxy between a client and a server that misbehaves on purpose: delays, stalls, cuts, errors and garbage."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

ERROR = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 6\r\nconnection: close\r\n\r\nbroken"
GARBAGE = (
    b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\nconnection: close\r\n\r\n{"choices'
)
PIECE = 65536


@dataclass(frozen=True)
class Fault:
    """What becomes of the answers to requests whose path begins with `path`."""

    kind: str
    """`delay`: the answer comes `seconds` late.  `stall`: the head comes, and nothing after it.  `cut`: the connection
    ends in the middle of the body.  `error`: 500.  `garbage`: 200 with half a JSON.  `refuse`: no answer at all.
    `pass`: nothing."""
    path: str = "/"
    body: bytes = b""
    """Text that the request's body has."""
    skip: int = 0
    """How many such requests pass before."""
    times: int = 1_000_000
    """How many requests it befalls."""
    seconds: float = 0.0
    call: Callable[[], None] | None = None
    """Called before such a request is passed on, once."""

    def fits(self, path: str, body: bytes) -> bool:
        return self.times > 0 and path.startswith(self.path) and self.body in body


class FaultyProxy:
    """Passes bytes on; `faults` may be set at any time, and a request takes the first that fits it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target, self.faults = target, list[Fault]()
        self.requests: list[str] = []
        """The path of every request, in order."""
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self.server: asyncio.Server | None = None
        self.open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    def cut_off(self) -> None:
        """As a network that is down: open connections end, and new ones are refused, until `join`."""
        asyncio.run_coroutine_threadsafe(self.leave(), self.loop).result(10)

    def join(self) -> None:
        asyncio.run_coroutine_threadsafe(self.start(), self.loop).result(10)

    async def leave(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in list(self.open):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError, asyncio.LimitOverrunError):
            while await self.one_request(reader, writer):
                pass
        self.open.discard(writer)
        writer.close()

    def next_fault(self, path: str, body: bytes) -> Fault | None:
        """What befalls a request, counted."""
        for place, fault in enumerate(self.faults):
            if fault.fits(path, body):
                skips = fault.skip > 0
                self.faults[place] = replace(fault, skip=fault.skip - skips, times=fault.times - (not skips))
                return None if skips else fault
        return None

    async def one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request and its answer on; whether the connection may have another."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(length_of(head)) if length_of(head) else b""
        path = head.split(b" ", 2)[1].decode()
        self.requests.append(path)
        fault = self.next_fault(path, body)
        kind = "" if fault is None else fault.kind
        if fault is not None and fault.call is not None:
            fault.call()
        if kind in ("refuse", "error", "garbage"):
            writer.write({"refuse": b"", "error": ERROR, "garbage": GARBAGE}[kind])
            await writer.drain()
            return False
        behind, ahead = await asyncio.open_connection(*self.target)
        try:
            ahead.write(re.sub(rb"(?im)^host:[^\r]*", f"Host: {self.target[0]}:{self.target[1]}".encode(), head) + body)
            await ahead.drain()
            answer = await behind.readuntil(b"\r\n\r\n")
            left = length_of(answer)
            if kind == "delay":
                await asyncio.sleep(fault.seconds if fault else 0)
            writer.write(answer)
            await writer.drain()
            if kind == "stall":
                await reader.read()  # until the client gives up
                return False
            if kind == "cut":
                writer.write(await behind.readexactly(left // 2))
                await writer.drain()
                return False
            while left:
                piece = await behind.read(min(left, PIECE))
                if not piece:
                    return False
                left -= len(piece)
                writer.write(piece)
                await writer.drain()
        finally:
            ahead.close()
        return True


def length_of(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


@contextmanager
def faulty_proxy(host: str, port: int) -> Iterator[FaultyProxy]:
    """A proxy before a server, in a thread of its own."""
    proxy = FaultyProxy((host, port))
    thread = threading.Thread(target=proxy.loop.run_forever, name="faulty proxy", daemon=True)
    thread.start()
    proxy.join()
    try:
        yield proxy
    finally:
        proxy.cut_off()
        proxy.loop.call_soon_threadsafe(proxy.loop.stop)
        thread.join(10)
