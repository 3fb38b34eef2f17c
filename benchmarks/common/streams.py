"""A client of many streams that does next to nothing while they run: what it received is looked at afterwards.

Clients of a real server have processors of their own. Here they share the server's, so what this one takes would count
as the server's. A patient client takes less still: behind its first event, the kernel wakes it up for a full buffer or
for the end alone.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Struct

EVENT = b"data: "
DONE = b"data: [DONE]"
PATIENT_BYTES = 64 << 10
"""Those that a patient client lets pile up in its socket; the kernel takes half of the buffer at most."""


class Stream(Struct):
    """What one stream brought. first_seconds: from its request to its first event. deltas: events with tokens.

    seconds: from its request to its end. is_whole: whether it ended with [DONE].
    """

    first_seconds: float
    seconds: float
    deltas: int
    token_ids: list[int]
    text: str
    is_whole: bool


class _Receiver(asyncio.Protocol):
    """Keeps all that comes, until the connection ends."""

    def __init__(self, is_patient: bool) -> None:
        self._is_patient = is_patient
        self._socket: socket.socket | None = None
        self.begin = time.perf_counter()
        self.first: float | None = None
        self.parts: list[bytes] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        if self.first is None and EVENT in data:
            self.first = time.perf_counter()
            if self._is_patient and self._socket is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PATIENT_BYTES)
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(time.perf_counter())


def run_streams(url: str, bodies: list[dict[str, Any]], is_patient: bool = False) -> tuple[float, list[Stream]]:
    """Send completions all at once, with `stream` and `return_token_ids`. Returns the seconds until the last one has
    ended, and what each has brought."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_together(url, bodies, is_patient))


async def read_stream(url: str, body: dict[str, Any], key: str) -> Stream:
    """Send one completion, as `run_streams` does. key: of the server's."""
    return _read(*await _receive(url, body, key))


async def _together(url: str, bodies: list[dict[str, Any]], is_patient: bool) -> tuple[float, list[Stream]]:
    begin = time.perf_counter()
    received = await asyncio.gather(*(_receive(url, body, is_patient=is_patient) for body in bodies))
    return time.perf_counter() - begin, [_read(*each) for each in received]


async def _receive(url: str, body: dict[str, Any], key: str = "", is_patient: bool = False) -> tuple[_Receiver, float]:
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    assert address.hostname and address.port
    transport, receiver = await loop.create_connection(lambda: _Receiver(is_patient), address.hostname, address.port)
    content = msgspec.json.encode({**body, "stream": True, "return_token_ids": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    transport.write(head.encode() + content)
    return receiver, await receiver.ended


def _read(receiver: _Receiver, end: float) -> Stream:
    lines = [line for line in b"".join(receiver.parts).splitlines() if line.startswith(EVENT)]
    chunks = [msgspec.json.decode(line.removeprefix(EVENT)) for line in lines if line != DONE]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    first = receiver.first if receiver.first is not None else end
    return Stream(
        first - receiver.begin,
        end - receiver.begin,
        sum(bool(choice["token_ids"]) for choice in choices),
        [token_id for choice in choices for token_id in choice["token_ids"]],
        "".join(choice["text"] for choice in choices),
        bool(lines) and lines[-1] == DONE,
    )
