"""Streams that go on without their client and can be read again: a page that is loaded anew gets its answer's rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvllm.serving.errors import ApiError, unavailable
from kvllm.serving.sse import EventStream, Write, write_out

HEADER = "x-keep-answer"
"""Of a request whose stream is to be kept: an id that the client chooses."""
MAX_ANSWERS = 16
MAX_BYTES = 64 << 20
MAX_SECONDS = 900.0
"""Bounds for each key. An answer that has ended goes after this time; the one that ended first goes sooner."""


class KeptAnswer:
    """The events of a stream. The work goes on whether somebody reads or not. ended: when, None while it runs."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.size = 0
        self.ended: float | None = None
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._work = asyncio.ensure_future(stream.source(self._write))
        self._work.add_done_callback(self._end)

    @property
    def is_refused(self) -> bool:
        """Whether the work has ended before its first event, as for a server without room."""
        return self.ended is not None and not self._events

    def reader(self, after: int) -> EventStream:
        """The events after the first `after`, and those to come."""

        async def read(write: Write) -> None:
            number = after
            while True:
                if number < len(self._events):
                    data, number = b"".join(self._events[number:]), len(self._events)
                    await write_out(write, data)
                elif self.ended is None:
                    await self._changed.wait()
                elif self._work.cancelled():
                    return None
                else:
                    return self._work.result()

        return EventStream(read, self.stream.done, self.stream.failure)

    def cancel(self) -> None:
        """End the work; readers get what there is."""
        if not self._work.cancelling():
            self._work.cancel()

    def _write(self, data: bytes) -> None:
        if not data:
            return
        number = len(self._events) + 1
        self._events.append(data[:-1] + b"id: %d\n\n" % number)  # into the last event, before its empty line
        self.size += len(self._events[-1])
        self._wake()

    def _end(self, work: asyncio.Future[None]) -> None:
        self.ended = time.monotonic()
        if not work.cancelled():
            work.exception()  # it is told to readers; without any it is no error of the server
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class KeptAnswers:
    """The kept answers of all keys, within the bounds above. Used on the event loop alone."""

    def __init__(self) -> None:
        self._shelves: dict[str, dict[str, KeptAnswer]] = {}

    def start(self, tenant: str, name: str, make: Callable[[], KeptAnswer]) -> KeptAnswer:
        """Keep a new answer. Raises ApiError if its id is taken, or too many are running."""
        shelf = self._shelf(tenant)
        if name in shelf and not shelf[name].is_refused:
            raise ApiError(409, f"there is an answer with the id {name!r} already: choose another one", param=HEADER)
        while len(shelf) >= MAX_ANSWERS or sum(answer.size for answer in shelf.values()) > MAX_BYTES:
            ended = [(answer.ended, other) for other, answer in shelf.items() if answer.ended is not None]
            if not ended:
                raise unavailable(f"{len(shelf)} kept answers are running: wait for one, or stop one")
            del shelf[min(ended)[1]]
        shelf[name] = make()
        return shelf[name]

    def get(self, tenant: str, name: str) -> KeptAnswer:
        """Raises ApiError with status 404 if it is not there."""
        if (answer := self._shelf(tenant).get(name)) is None:
            why = f"answers are kept for {MAX_SECONDS / 60:.0f} minutes after their end, none over a restart"
            raise ApiError(404, f"There is no kept answer {name[:100]!r}: {why}.")
        return answer

    def _shelf(self, tenant: str) -> dict[str, KeptAnswer]:
        """The answers of a key, without those whose time is over."""
        first = time.monotonic() - MAX_SECONDS
        kept = {
            name: answer
            for name, answer in self._shelves.get(tenant, {}).items()
            if answer.ended is None or answer.ended >= first
        }
        self._shelves[tenant] = kept
        return kept
