"""Messages: frames over a stream socket (four bytes of length, then that many bytes), and packed ones to the server.

Those between the pool and a ready fork-server are packed rather than written out: reading JSON touches memory that the
server shares with its children, and every page that is touched is copied.  The first byte says which message it is.
"""

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than a small program to run
    from typing import Protocol

    class Channel(Protocol):
        """A stream, as far as messages need one: a socket is one."""

        def sendall(self, data: bytes, /) -> None: ...

        def recv(self, count: int, /) -> bytes: ...

        def close(self) -> None: ...


KINDS = ("syntax", "program", "calls", "tests")

START, KILL = 1, 2
STARTED, ENDED = 1, 2

start = struct.Struct("<BQBQQ")
"""START, job, place of the kind, seconds of processor time, bytes of memory; with four descriptors."""
kill = struct.Struct("<BQ")
"""KILL, job."""
started = struct.Struct("<BQQ")
"""STARTED, job, process id."""
ended = struct.Struct("<BQidQ")
"""ENDED, job, status as `wait` gives it, seconds of processor time, bytes of the largest resident set."""

MAX_BYTES = 4 << 20
"""Longest message; a longer one ends the conversation."""


class ChannelClosed(Exception):
    """The other side is gone, or does not keep to the format."""


class Descriptor:
    """A stream that is already open, without the cost of a socket object."""

    def __init__(self, number: int) -> None:
        self.number = number

    def sendall(self, data: bytes, /) -> None:
        while data:
            data = data[os.write(self.number, data) :]

    def recv(self, count: int, /) -> bytes:
        return os.read(self.number, count)

    def close(self) -> None:
        os.close(self.number)


def send(channel: "Channel", payload: bytes, *, most: int = MAX_BYTES) -> None:
    if len(payload) > most:
        raise ChannelClosed
    channel.sendall(len(payload).to_bytes(4, "little") + payload)


def receive(channel: "Channel", *, most: int = MAX_BYTES) -> bytes:
    length = int.from_bytes(exactly(channel, 4), "little")
    if length > most:
        raise ChannelClosed
    return exactly(channel, length)


def exactly(channel: "Channel", count: int) -> bytes:
    """Wait for that many bytes."""
    parts = []
    while count:
        part = channel.recv(min(count, 1 << 16))
        if not part:
            raise ChannelClosed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
