"""The time that a request's line and headers may take, with a bound of a test on the protocol that serves."""

from __future__ import annotations

import asyncio
import time

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


async def exchange(port: int, parts: list[bytes], pause: float) -> tuple[bytes, float]:
    """Send parts with pauses between them. Returns what came until the connection's end, and how long that took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begin = time.monotonic()

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
    ids=["silence", "a byte at a time", "empty lines behind an answer", "a second head", "a slow answer"],
)
def test_a_head_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch, parts: list[bytes], answers: int) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", SECONDS)

    async def run() -> tuple[bytes, float]:
        config = uvicorn.Config(
            answer_slowly, port=0, http=http.HttpProtocol, lifespan="off", log_config=None, timeout_keep_alive=1
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        found = await exchange(port, parts, SECONDS / 3)
        server.should_exit = True
        await serving
        return found

    content, seconds = asyncio.run(run())
    assert content.count(b"been") == answers
    assert SECONDS <= seconds < 10
