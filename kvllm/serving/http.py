"""HTTP on a connection: uvicorn's protocol, with bounds on the head of a request and errors of our shape."""

from __future__ import annotations

import asyncio
import logging
import resource
import weakref
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvllm.serving.errors import ApiError

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, and of all that is no content between two pieces of its body."""
MAX_HEADERS = 256
MAX_PIPELINED = 32
"""Requests on a connection that wait for the answers to those before them."""
SPARE_FILES = 256
"""Of the process's limit on open files, so many are not for connections."""
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
    good. Nor does it keep files free for those who come when idle connections have all of them.
    """

    _answering: RequestResponseCycle | None = None
    _timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _is_receiving = False
    _had_body = False
    _bare_bytes = 0
    """Since the request began or the last piece of its body."""
    _refusal: tuple[int, str] | None = None
    """Why the parser was stopped."""
    _begin = 0.0
    """Of the connection, then of its newest request."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._begin = self.loop.time()
        self._start_timer()
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if transport.get_extra_info("socket").fileno() >= most - SPARE_FILES:  # a new file has the lowest free number
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_answer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.cycle.response_complete:  # uvicorn's own timer ends with any byte
            self._start_timer()
        self._had_body = False
        super().data_received(data)
        if self._had_body or not self._is_receiving:
            self._bare_bytes = 0
            return
        self._bare_bytes += len(data)  # the parser tells of a header once it is complete, and keeps it until then
        if self._bare_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(*self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = self._is_receiving = True
        self._bare_bytes, self._begin = 0, self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer: nothing here reads them, and uvicorn would add them to the headers without a bound
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop(431, f"the request has more than {MAX_HEADERS} headers: send less")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._stop(*self._too_large())
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(400, f"more than {MAX_PIPELINED} requests wait for an answer on this connection")
        self._check_fields()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._had_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_receiving = False
        super().on_message_complete()

    def _check_fields(self) -> None:
        """Refuse what a proxy may understand in another way: two hosts, or a body in other codings than chunks."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        is_new = cast(Any, self.parser).get_http_version() == "1.1"
        if hosts > 1 or (is_new and hosts == 0):
            self._stop(400, f"the request has {hosts} headers 'Host': one is needed")
        if codings and (codings != [b"chunked"] or not is_new):
            self._stop(400, "the body has a Transfer-Encoding other than 'chunked' of HTTP/1.1")

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, "this is no HTTP request that the server understands")))

    def _stop(self, status: int, message: str) -> None:
        """Leave the parser, which makes every exception one of its own; that ends in `send_400_response`."""
        self._refusal = status, message
        raise ValueError

    def _too_large(self) -> tuple[int, str]:
        return 431, f"the request's line and headers are larger than {MAX_HEAD_BYTES} bytes: send less"

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, and close the connection. Into another answer, nothing is written."""
        self._stop_timer()
        if self._answering is not None and self._answering.response_started and not self._answering.response_complete:
            self.transport.close()
            self._end_answer()
            return
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

    def _make_room(self) -> None:
        """Close an eighth of the connections that have sent no whole request, those that began first."""
        waiting = [each for each in cast(set[HttpProtocol], self.connections) if each.is_waiting()]
        waiting.sort(key=lambda each: each._begin)
        del waiting[len(waiting) // 8 + 1 :]
        for each in waiting:
            each.transport.close()
        message = "the limit on open files is near: %d connections without a whole request are closed"
        logger.warning(message, len(waiting))

    def is_waiting(self) -> bool:
        """Whether the connection has no request that has arrived as a whole and is not answered."""
        return self._is_receiving or self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
