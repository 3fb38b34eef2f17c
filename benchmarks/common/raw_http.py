"""Bytes to a server and back, for requests that no library would send."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections import Counter
from urllib.parse import urlsplit

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
KEY = b"sk-crowd"
"""Of the requests that harm."""
RESET = struct.pack("ii", 1, 0)
"""A linger time of 0: the connection ends with a reset."""


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


async def exchange(url: str, data: bytes, seconds: float) -> bytes:
    """Send bytes, and return what came until the server closed the connection, or until so many seconds have passed."""
    reader, writer = await connect(url)
    content = bytearray()
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            writer.write(data)
            while part := await reader.read(1 << 16):
                content += part
    await close(writer)
    return bytes(content)


async def close(writer: asyncio.StreamWriter, *, reset: bool = False) -> None:
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def post(path: str, body: bytes) -> bytes:
    """A request whose answer ends with the connection."""
    return head(path) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def head(path: str) -> bytes:
    """The beginning of a request with a JSON body, without the body's length."""
    fields = b"Host: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n" % KEY
    return b"POST %s HTTP/1.1\r\n" % path.encode() + fields


def count_statuses(statuses: Counter[str], content: bytes) -> None:
    """Count the answers in what a server has sent; "no answer" if there is none."""
    found = [status.decode() for status in STATUS.findall(content)]
    statuses.update(found or ["no answer"])
