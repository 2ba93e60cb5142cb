"""Messages over a stream socket: four bytes of length, then that many bytes."""

import socket

MAX_BYTES = 4 << 20
"""Longest message; a longer one ends the conversation."""


class Closed(Exception):
    """The other side is gone, or does not keep to the format."""


def send(channel: socket.socket, payload: bytes, *, most: int = MAX_BYTES) -> None:
    """Send one message."""
    if len(payload) > most:
        raise Closed
    channel.sendall(len(payload).to_bytes(4, "little") + payload)


def receive(channel: socket.socket, *, most: int = MAX_BYTES) -> bytes:
    """Wait for one message."""
    length = int.from_bytes(exactly(channel, 4), "little")
    if length > most:
        raise Closed
    return exactly(channel, length)


def exactly(channel: socket.socket, count: int) -> bytes:
    """Wait for that many bytes."""
    parts = []
    while count:
        part = channel.recv(min(count, 1 << 16))
        if not part:
            raise Closed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
