"""A judge's endpoint that misbehaves on purpose: a real HTTP server on loopback that plays a list of replies."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[[dict[str, Any], BaseHTTPRequestHandler], None]
"""What becomes of one request: its body, and the connection to answer on."""


def says(content: str, *, tokens: int = 10) -> Play:
    """A proper reply with this text."""

    return raw(json.dumps({"choices": [{"message": {"content": content}}], "usage": {"total_tokens": tokens}}))


def status(code: int, **headers: str) -> Play:
    return lambda body, connection: reply(connection, code, '{"error": {"message": "no"}}', headers)


def raw(text: str) -> Play:
    return lambda body, connection: reply(connection, 200, text)


def slow(seconds: float, then: Play) -> Play:
    def play(body: dict[str, Any], connection: BaseHTTPRequestHandler) -> None:
        time.sleep(seconds)
        then(body, connection)

    return play


def drips(seconds: float) -> Play:
    """Never pauses long, and is never done: a byte every so many seconds."""

    def play(body: dict[str, Any], connection: BaseHTTPRequestHandler) -> None:
        connection.send_response(200)
        connection.send_header("Content-Length", "1000000")
        connection.end_headers()
        while True:
            connection.wfile.write(b" ")
            time.sleep(seconds)

    return play


def endless(body: dict[str, Any], connection: BaseHTTPRequestHandler) -> None:
    """Sends as fast as it is read, without end."""
    connection.send_response(200)
    connection.end_headers()
    while True:
        connection.wfile.write(b" " * 65536)


def hangs_up(body: dict[str, Any], connection: BaseHTTPRequestHandler) -> None:
    connection.close_connection = True
    connection.connection.close()


def truncated(body: dict[str, Any], connection: BaseHTTPRequestHandler) -> None:
    """Promises more than it sends."""
    connection.send_response(200)
    connection.send_header("Content-Length", "1000")
    connection.end_headers()
    connection.wfile.write(b'{"choices": [{"mess')
    connection.close_connection = True


def reply(connection: BaseHTTPRequestHandler, code: int, text: str, headers: dict[str, str] | None = None) -> None:
    payload = text.encode()
    connection.send_response(code)
    for name, value in (headers or {}).items():
        connection.send_header(name.replace("_", "-"), value)
    connection.send_header("Content-Length", str(len(payload)))
    connection.end_headers()
    connection.wfile.write(payload)


class Endpoint:
    """What was asked, and what is played in which order; the last play is repeated."""

    def __init__(self, plays: list[Play]) -> None:
        self.plays = plays
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = ""

    def next(self, body: dict[str, Any], headers: dict[str, str]) -> Play:
        with self.lock:
            self.asked.append(body)
            self.headers.append(headers)
            return self.plays[min(len(self.asked), len(self.plays)) - 1]


@contextmanager
def endpoint(*plays: Play) -> Iterator[Endpoint]:
    """A server that plays these replies, one a request."""
    made = Endpoint(list(plays))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a second write of an answer waits 40 ms for an acknowledgement

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            play = made.next(body, dict(self.headers))
            with made.lock:
                made.at_once += 1
                made.most_at_once = max(made.most_at_once, made.at_once)
            try:
                play(body, self)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                with made.lock:
                    made.at_once -= 1

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
