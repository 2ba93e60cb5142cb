"""Messages as frames over a socket, for a side that must not wait: frames.py in `inside/` is the side that may."""

import socket
from collections.abc import Iterator

from posttrain.sandbox.inside.frames import MAX_BYTES, ChannelClosed

READ_BYTES = 1 << 16


class MessageTooLong(ChannelClosed):
    """The other side announces a message that is longer than allowed."""


class MessageStream:
    """Our end of a socket pair to another process; never blocks."""

    def __init__(self, *, most: int = MAX_BYTES) -> None:
        self.most = most
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.socket, self.theirs = socket.socketpair()
        """`theirs` is the other process's end."""
        self.socket.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send a message as far as the socket takes it; `flush` sends the rest."""
        self.outgoing += len(payload).to_bytes(4, "little") + payload
        self.flush()

    def flush(self) -> None:
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:  # the other side is closed, as reading will show
            self.outgoing.clear()

    def messages(self) -> Iterator[bytes]:
        """Read once and yield the complete messages.  Raises ChannelClosed at the end, and MessageTooLong."""
        try:
            part = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed from error
        self.incoming += part
        while len(self.incoming) >= 4:
            end = 4 + int.from_bytes(self.incoming[:4], "little")
            if end - 4 > self.most:
                raise MessageTooLong
            if len(self.incoming) < end:
                break
            payload = bytes(self.incoming[4:end])
            del self.incoming[:end]
            yield payload
        if not part:
            raise ChannelClosed

    def has_ended(self) -> bool:
        """Whether the other side has closed the socket and everything is read."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.theirs.close()
        self.socket.close()
