"""Messages between the engine's process and a rank: bytes with a number, over a TCP connection.

A plain connection costs less per step than any call through Ray, works between machines as on one, and its end tells
at once that the other side is gone.
"""

from __future__ import annotations

import select
import socket
import struct
import threading

HEADER = struct.Struct("<qI")  # number, length


class Channel:
    """One end of a connection. Several threads may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, number: int, message: bytes = b"") -> None:
        with self._sending:
            self.connection.sendall(HEADER.pack(number, len(message)) + message)

    def has_message(self, seconds: float) -> bool:
        """Whether one begins within so many seconds, or the other side is gone."""
        return bool(select.select([self.connection], [], [], seconds)[0])

    def receive(self) -> tuple[int, bytes]:
        """The next message. Raises EOFError if the other side is gone, TimeoutError if it stops halfway."""
        number, length = HEADER.unpack(self.receive_exactly(HEADER.size))
        return number, self.receive_exactly(length)

    def receive_exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self.connection.recv(length - len(parts))
            if not part:
                raise EOFError("the connection was closed")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.connection.close()
