"""Streams of events: what is sent when nothing comes, when an error comes, and when the client goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvllm.errors import RequestError
from kvllm.serving import sse
from kvllm.serving.sse import ClientGone, EventStream, Write, write_out


class Connection:
    """A client that reads at once, and goes away when `gone` is set."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_a_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow first event does not hold back the headers."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(sse, "FIRST_EVENT_SECONDS", 0.05)

    async def events(write: Write) -> None:
        await asyncio.sleep(0.4)
        await write_out(write, b"data: 1\n\n")
        await write_out(write, b"data: 2\n\n")

    async def run() -> Connection:
        connection = Connection()
        task = asyncio.ensure_future(EventStream(events)({}, connection.receive, connection.send))
        await asyncio.sleep(0.25)
        assert connection.sent[0]["status"] == 200 and set(connection.body.split(b"\n\n")) == {b": keep-alive", b""}
        await task
        return connection

    connection = asyncio.run(run())
    assert connection.body.endswith(b": keep-alive\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n")
    assert connection.sent[-1]["more_body"] is False


@pytest.mark.parametrize("events_before", [0, 1])
def test_errors(events_before: int) -> None:
    """An error before the headers is raised; a later one is an event."""

    async def events(write: Write) -> None:
        for _ in range(events_before):
            await write_out(write, b"data: 1\n\n")
        raise RequestError("no room")

    async def run() -> Connection:
        connection = Connection()
        await EventStream(events)({}, connection.receive, connection.send)
        return connection

    if events_before == 0:
        with pytest.raises(RequestError, match="no room"):
            asyncio.run(run())
        return
    _, error, done, _ = asyncio.run(run()).body.split(b"\n\n")
    assert b'"message":"no room"' in error and b'"code":400' in error and done == b"data: [DONE]"


def test_a_client_that_goes_cancels_the_source() -> None:
    closed: list[bool] = []

    async def events(write: Write) -> None:
        try:
            await write_out(write, b"data: 1\n\n")
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def run() -> None:
        connection = Connection()
        task = asyncio.ensure_future(EventStream(events)({}, connection.receive, connection.send))
        while not connection.body:
            await asyncio.sleep(0.01)
        connection.gone.set()
        with pytest.raises(ClientGone):
            await asyncio.wait_for(task, 5)
        assert closed == [True]

    asyncio.run(run())
