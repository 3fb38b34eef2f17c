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
        self._beginning = asyncio.Lock()
        self._is_silent = True  # since the last look of `_break_silence`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        gone, silence = asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(self._break_silence(send))
        end_task = lambda _: task.cancel()  # noqa: E731
        gone.add_done_callback(end_task)
        try:
            await self._send_events(send)
        except asyncio.CancelledError:
            if not gone.done():
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            gone.remove_done_callback(end_task)
            gone.cancel()
            silence.cancel()
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
        except Exception as error:
            if not self._has_begun:
                raise
            await self._send(send, self._failure(as_api_error(error)))
        await self._send(send, self._done, more=False)

    async def _break_silence(self, send: Send) -> None:
        """Send the headers if the first event is late, and comments between events that come late."""
        await asyncio.sleep(FIRST_EVENT_SECONDS)
        await self._begin(send)
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._is_silent:
                await self._send(send, KEEP_ALIVE)

    async def _begin(self, send: Send) -> None:
        """Send the headers, unless that was done. Two may want to at once."""
        async with self._beginning:
            if not self._has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self._has_begun = True

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        self._is_silent = False
        if not self._has_begun:
            await self._begin(send)
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future) -> None:
    """Cancel a task and wait until it has cleaned up."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
