"""Listening with uvicorn, in this thread until a signal comes, or in a separate thread."""

import asyncio
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.errors import StoppedAtOnce, UserError
from posttrain.server.application import Application

QUIET_SECONDS = 60
"""Timeout of a connection whose client should send or read."""
ENDING_SECONDS = 5
"""Time for requests to end after a signal, once their sampling has stopped."""
LOOK_SECONDS = 0.2
"""Seconds between checks whether a client that has finished sending still reads."""


class Connection(H11Protocol):
    """uvicorn's connection with timeouts, which also answers a client that has only closed its sending side.

    Such a client looks like one that has left, until something is sent to it, which only a client that has left
    rejects.  `100 Continue` may come before any answer, except with HTTP/1.0, where such a client counts as gone.  It
    is repeated after 1, 2, 4, … seconds, since some clients only accept a few.
    """

    quiet: asyncio.TimerHandle | None = None
    stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self.quiet, self.stuck):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._wait_for_client()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.call_later(QUIET_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stuck is not None:
            self.stuck.cancel()

    def _wait_for_client(self) -> None:
        if self.quiet is not None:
            self.quiet.cancel()
        self.quiet = self.loop.call_later(QUIET_SECONDS, self._close_if_quiet)

    def _close_if_quiet(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection open."""
        waits = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not waits or self.conn.their_http_version != b"1.1":
            return False
        self.cycle.keep_alive = False  # it sends no other request
        self._ask_whether_it_reads(after=1.0, at=self.loop.time())
        return True

    def _ask_whether_it_reads(self, *, after: float, at: float) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        poll = select.poll()  # which knows descriptors above 1,023 too
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # only hung-up and error are reported
            self.transport.abort()
            return
        if self.loop.time() >= at:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim))
            at, after = self.loop.time() + after, 2 * after
        self.loop.call_later(LOOK_SECONDS, lambda: self._ask_whether_it_reads(after=after, at=at))


def listening_socket(host: str, port: int, *, named: str) -> socket.socket:
    """A listening socket.  Raises UserError, which names the options, if it cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise UserError(f"{named}: cannot listen there ({error.strerror}).  Choose another port.") from error
    return made


class HttpServer:
    """An application behind a socket.  `at_end` is called before waiting for unfinished requests."""

    def __init__(
        self,
        application: Application,
        bound: socket.socket,
        *,
        headers: Mapping[str, str] | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.socket, self.at_end = bound, at_end
        self.port: int = bound.getsockname()[1]
        config = uvicorn.Config(
            application,
            http=Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="error",  # of requests nothing is printed: they may hold what should not be in a terminal
            access_log=False,
            server_header=False,
            headers=[("Server", "posttrain"), *(headers or {}).items()],
            proxy_headers=False,
            timeout_keep_alive=QUIET_SECONDS,
            timeout_graceful_shutdown=ENDING_SECONDS,
        )
        self.uvicorn = uvicorn.Server(config)

    async def _serve(self, signals: tuple[signal.Signals, ...] = ()) -> signal.Signals | None:
        """Serve until stopped; returns the signal that stopped it."""
        came: list[signal.Signals] = []
        loop, server = asyncio.get_running_loop(), self.uvicorn

        def stop(number: signal.Signals) -> None:
            if came:  # a second one waits for nothing
                server.force_exit = True
            came.append(number)
            server.should_exit = True

        for number in signals:
            loop.add_signal_handler(number, stop, number)
        try:
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup(sockets=[self.socket])
            await server.main_loop()
            await loop.run_in_executor(None, self.at_end)
            await server.shutdown(sockets=[self.socket])
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
        return came[0] if came else None

    def serve_until_signal(self) -> None:
        """Serve in the main thread; raises StoppedAtOnce at SIGINT and returns at SIGTERM."""
        if asyncio.run(self._serve((signal.SIGINT, signal.SIGTERM))) == signal.SIGINT:
            raise StoppedAtOnce("interrupted")

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve in a separate thread inside the block."""
        serving = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="http")
        serving.start()
        try:
            yield self
        finally:
            self.uvicorn.should_exit = True
            serving.join()
