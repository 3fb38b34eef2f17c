"""HTTP on a connection: uvicorn's protocol, with bounds on the head of a request and errors of our shape."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvllm.serving.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers."""
HEAD_SECONDS = 30.0
"""Time in which the head of a request has to arrive, from the connection's start or the first byte after an answer."""
CYCLE = "kvllm.cycle"
"""In an ASGI scope: a weak reference to uvicorn's part of the request, which has the scope."""


class BodyWriter:
    """Writes parts of a chunked body to a connection at once.

    A message of ASGI costs more than the few bytes of an event, and may be sent by a task alone.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Returns what to wait for before the next part, if the client reads too slowly."""
        cycle = self._cycle
        if cycle.disconnected or not data:  # an empty part would end the body
            return None
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return cycle.flow.drain() if cycle.flow.write_paused else None


def body_writer(scope: Scope) -> BodyWriter | None:
    """What writes to the body of an answer whose head was sent; None in a server that is not ours."""
    reference = scope.get(CYCLE)
    cycle: RequestResponseCycle | None = reference() if reference is not None else None
    return BodyWriter(cycle) if cycle is not None and cycle.chunked_encoding else None


class HttpProtocol(HttpToolsProtocol):
    """A connection that is closed when a head takes too long, and answered with an error when it is too large.

    uvicorn bounds neither: whoever sends a byte of a header now and then would hold a connection, and its memory, for
    good.
    """

    _answering: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0
    _head_is_too_large = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_answer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.cycle.response_complete:  # uvicorn's own timer ends with any byte
            self._start_timer()
        super().data_received(data)
        if self._is_in_head:  # the parser tells of a header once it is complete, and keeps it until then
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_is_too_large = True
            raise ValueError  # the parser makes it an error of its own, which ends in `send_400_response`
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._head_is_too_large:
            self._refuse_head()
        else:
            self._refuse(400, "this is no HTTP request that the server understands")

    def _refuse_head(self) -> None:
        self._refuse(431, f"the request's line and headers are larger than {MAX_HEAD_BYTES} bytes: send less")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, and close the connection."""
        self._stop_timer()
        body = ApiError(status, message).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._end_answer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cast(Scope, cycle.scope)[CYCLE] = weakref.ref(cycle)
        super()._start_asgi_task(cycle, app)

    def _end_answer(self) -> None:
        """Tell the request that is being answered that its client is gone. uvicorn tells the newest one of the
        connection alone, which may wait after it."""
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
