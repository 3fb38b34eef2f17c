"""Server-sent events: a stream of JSON that ends with [DONE], and a watch on clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvllm.serving.bodies import json_response
from kvllm.serving.errors import ApiError, as_api_error
from kvllm.serving.http import BodyWriter, body_writer

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 15.0
FIRST_EVENT_SECONDS = 0.5
"""Time that the headers wait for the first event: a request that the engine refuses gets a status of its own."""

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None] | None]
"""Sends data. What it returns must have ended before the next data are sent."""
Source = Callable[[Write], Awaitable[None]]
"""Writes the events of a stream, and returns after the last one."""


class Answer(Protocol):
    """What a route answers: a body of JSON, or the events of a stream."""

    async def complete(self) -> Any: ...

    async def stream(self, write: Write) -> None: ...


class ClientGone(Exception):
    """The client has closed its connection."""


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name, which some clients look for."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def event(data: bytes) -> bytes:
    """One event. JSON has no line breaks."""
    return b"data: " + data + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return event(error.body())


async def until_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientGone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))  # until it has cleaned up


async def respond(
    request: Request,
    answer: Answer,
    streams: bool | None,
    done: bytes = DONE,
    failure: Callable[[ApiError], bytes] = error_event,
) -> Response | EventStream:
    """The answer at once, or as a stream of events. done, failure: see EventStream."""
    if streams:
        return EventStream(answer.stream, done, failure)
    return json_response(await until_disconnected(request.receive, answer.complete()))


async def write_out(write: Write, data: bytes) -> None:
    """Write, and wait until more may follow."""
    if (sending := write(data)) is not None:
        await sending


class EventStream:
    """An answer that sends events as they come.

    Errors before the headers are raised; later ones become an event. Comments keep a silent connection alive. When the
    client goes away, the source is cancelled and ClientGone is raised.

    done: what ends the stream. failure: the event of an error.
    """

    def __init__(self, source: Source, done: bytes = DONE, failure: Callable[[ApiError], bytes] = error_event) -> None:
        self.source = source
        self.done = done
        self.failure = failure
        self._has_begun = False
        self._body: BodyWriter | None = None  # once the headers are sent, and where our own HTTP runs
        self._beginning = asyncio.Lock()
        self._is_silent = True  # since the last look of `_break_silence`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._asgi_send = scope, send
        silence = asyncio.ensure_future(self._break_silence())
        try:
            await until_disconnected(receive, self._send_events())
        finally:
            silence.cancel()

    async def _send_events(self) -> None:
        try:
            await self.source(self._write)
        except Exception as error:
            async with self._beginning:  # the headers may be on their way: no other status can follow on them
                if not self._has_begun:
                    raise
            await self._send(self.failure(as_api_error(error)))
        await self._send(self.done, more=False)

    async def _break_silence(self) -> None:
        """Send the headers if the first event is late, and comments between events that come late."""
        await asyncio.sleep(FIRST_EVENT_SECONDS)
        await self._begin()
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._is_silent:
                await self._send(KEEP_ALIVE)

    async def _begin(self) -> None:
        """Send the headers, unless that was done. Two may want to at once."""
        async with self._beginning:
            if not self._has_begun:
                await self._asgi_send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self._has_begun = True
                self._body = body_writer(self._scope)

    def _write(self, data: bytes) -> Awaitable[None] | None:
        if self._body is None:
            return self._send(data)
        self._is_silent = False
        return self._body.write(data)

    async def _send(self, data: bytes, more: bool = True) -> None:
        self._is_silent = False
        if not self._has_begun:
            await self._begin()
        await self._asgi_send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
