"""Server-sent events: a stream of JSON that ends with [DONE], and a watch on clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvllm.serving.errors import ApiError, as_api_error

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


class ClientGone(Exception):
    """The client has closed its connection."""


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name, which some clients look for."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def event(data: bytes) -> bytes:
    """One event. JSON has no line breaks."""
    return b"data: " + data + b"\n\n"


async def until_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientGone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        await _cancel(task)


class EventStream:
    """An answer that sends the events of a generator as they come.

    Errors before the headers are raised; later ones become an event. Comments keep a silent connection alive. When the
    client goes away, the generator is closed and ClientGone is raised.

    done: what ends the stream. failure: the event of an error.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        done: bytes = DONE,
        failure: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        self._events = events
        self._done = done
        self._failure = failure
        self._has_begun = False
        self._is_silent = True  # since the last look of `_keep_alive`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump, gone = asyncio.ensure_future(self._pump(send)), asyncio.ensure_future(_disconnected(receive))
        comments = asyncio.ensure_future(self._keep_alive(send))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                raise ClientGone
            pump.result()
        finally:
            for task in (gone, comments, pump):
                await _cancel(task)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        first = asyncio.ensure_future(_first(self._events))
        try:
            await asyncio.wait((first,), timeout=FIRST_EVENT_SECONDS)
            if first.done():
                first.result()  # raises
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            self._has_begun = True
            await self._send_events(send, first)
        finally:
            await _cancel(first)

    async def _send_events(self, send: Send, first: asyncio.Future[bytes]) -> None:
        try:
            await self._send(send, await first)
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            await self._send(send, self._failure(as_api_error(error)))
        await self._send(send, self._done, more=False)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._has_begun and self._is_silent:
                await self._send(send, KEEP_ALIVE)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        self._is_silent = False
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    """The first event; there is always one."""
    return await anext(events)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future) -> None:
    """Cancel a task and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
