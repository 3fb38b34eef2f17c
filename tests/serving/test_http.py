"""The protocol that serves, on real connections: the time that the head of a request may take, and slow readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from kvllm.serving import http

SECONDS = 0.4
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answer_slowly(scope, receive, send) -> None:
    """An answer that takes longer than a head may."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"be", "more_body": True})
    await asyncio.sleep(2 * SECONDS)
    await send({"type": "http.response.body", "body": b"en"})


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[int]:
    """A server of an application. Gives its port."""
    config = uvicorn.Config(app, port=0, http=http.HttpProtocol, lifespan="off", log_config=None, **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def exchange(port: int, parts: list[bytes], pause: float) -> tuple[bytes, float]:
    """Send parts with pauses between them. Returns what came until the connection's end, and how long that took."""
    begin = time.monotonic()  # before the server can know of the connection
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)

    sending = asyncio.create_task(send())
    content = await asyncio.wait_for(reader.read(-1), 30)
    sending.cancel()
    writer.close()
    return content, time.monotonic() - begin


@pytest.mark.parametrize(
    ("parts", "answers"),
    [
        ([], 0),
        ([bytes([byte]) for byte in REQUEST[:-2] * 9], 0),
        ([REQUEST, *[b"\r\n"] * 200], 1),
        ([REQUEST, b"", b"", b"", b"GET / HT"], 1),
        ([REQUEST[:10], REQUEST[10:]], 1),
    ],
    ids=["silence", "a byte at a time", "empty lines after an answer", "a second head", "a slow answer"],
)
def test_a_head_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch, parts: list[bytes], answers: int) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", SECONDS)

    async def run() -> tuple[bytes, float]:
        async with serving(answer_slowly, timeout_keep_alive=1) as port:
            return await exchange(port, parts, SECONDS / 3)

    content, seconds = asyncio.run(run())
    assert content.count(b"been") == answers
    assert SECONDS <= seconds < 10


def test_a_body_waits_for_its_reader() -> None:
    """Parts go straight to the connection until it is full; then the writer is told to wait until it is not."""
    part, written, read = b"x" * 10_000, 0, asyncio.Event()

    async def answer(scope, receive, send) -> None:
        nonlocal written
        assert http.body_writer(scope) is None  # the head is to come
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writer = http.body_writer(scope)
        assert writer is not None
        while (waiting := writer.write(part)) is None:
            written += len(part)
            assert written < 100 << 20
        waiting = asyncio.ensure_future(waiting)
        await asyncio.wait((waiting,), timeout=0.2)
        assert not waiting.done()
        read.set()
        await asyncio.wait_for(waiting, 30)
        await send({"type": "http.response.body", "body": part})

    async def run() -> bytes:
        async with serving(answer) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
            writer.write(REQUEST[:-2] + b"Connection: close\r\n\r\n")
            await asyncio.wait_for(read.wait(), 30)
            content = await asyncio.wait_for(reader.read(-1), 30)
            writer.close()
            return content

    content = asyncio.run(run())
    assert content.count(b"x") == written + 2 * len(part)
    assert content.endswith(b"\r\n%b\r\n0\r\n\r\n" % part)
