"""One engine for the calls of several threads, each of which waits for the outputs of its own requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from kvllm.errors import RequestError
from kvllm.outputs import RequestOutput

LONGEST_WAIT = 0.1
"""Seconds after which a waiting call looks for itself whether it is its turn: the news may have been cut short."""


class Engine(Protocol):
    """The part of an engine that calls use. See LLMEngine."""

    def has_unfinished_requests(self) -> bool: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[RequestOutput]: ...


Order = Callable[[], RequestOutput | None]
"""Adds a request to the engine and returns its output, or does something else between two steps."""


class Call:
    """What one thread waits for.

    orders: that were not carried out yet. outputs: of the requests that were added. num_unfinished: of these.
    finished: outputs that ended since the thread last looked. failure: what an order has raised.
    """

    def __init__(self, orders: Iterable[tuple[str, Order]]) -> None:
        self.thread = threading.current_thread()
        self.orders = deque(orders)
        self.outputs: list[RequestOutput] = []
        self.num_unfinished = 0
        self.begun: str | None = None  # the request that is being added
        self.failure: Exception | None = None
        self.finished: SimpleQueue[RequestOutput] = SimpleQueue()
        self.news: SimpleQueue[None] = SimpleQueue()

    @property
    def is_done(self) -> bool:
        return self.failure is not None or not (self.orders or self.num_unfinished)

    @property
    def has_requests(self) -> bool:
        """Whether the engine may have some of its requests."""
        return bool(self.num_unfinished or self.begun)


class SharedEngine:
    """Lets several threads call one engine: the oldest call steps it, for the requests of all, and the others wait.

    No lock is held, so no exception can leave one behind: which call is the oldest follows from the list of calls, of
    which each takes itself out when it ends, however it ends. What an interrupt has cut short, in the engine or in what
    is counted here, is made right by the next turn.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: list[Call] = []
        self._abandoned: list[Call] = []  # ended by an exception, with requests that the engine still has
        self._call_of: dict[str, Call] = {}  # unfinished requests
        self._last: Call | None = None  # which had the last turn

    def run(
        self, orders: Iterable[tuple[str, Order]], on_finished: Callable[[list[RequestOutput]], None]
    ) -> list[RequestOutput]:
        """Carry out orders, and step the engine until their requests have ended.

        Args:
            orders: each with the id of the request that it adds, or "". They run between two steps, perhaps in another
                thread.
            on_finished: called in this thread with the requests that have ended, perhaps none, as steps go on.

        Returns:
            The outputs, in the order of the orders.

        Raises:
            RequestError: the engine has requests that somebody else has added. Else what an order, a step or
                `on_finished` raises: the unfinished requests are then aborted.
        """
        call = Call(orders)
        self._take_out(lambda each: each.thread is call.thread)  # an interrupt has cut short how it took itself out
        self._calls.append(call)
        try:
            while not call.is_done:
                if self._leads(call):
                    self._take_turn(call)
                else:
                    with suppress(Empty):
                        call.news.get(timeout=LONGEST_WAIT)
                on_finished(_drain(call.finished))
        finally:
            self._leave(call)
        if call.failure is not None:
            raise call.failure
        return call.outputs

    def _leads(self, call: Call) -> bool:
        self._take_out(lambda each: not each.thread.is_alive())
        return self._calls[:1] == [call]

    def _take_out(self, has_left: Callable[[Call], bool]) -> None:
        for each in [each for each in self._calls if has_left(each)]:
            each.failure = RequestError("another call of this thread began while this one ran, and has ended it")
            self._abandoned.append(each)
            self._calls.remove(each)

    def _take_turn(self, call: Call) -> None:
        """Carry out the orders of all calls, and take a step."""
        if self._last is not call:  # which may have been cut short anywhere
            self._count_again()
            self._last = call
        while self._abandoned:
            self._abort(self._abandoned[-1])
            self._abandoned.pop()
        for each in self._calls[:]:
            self._carry_out(each)
        if self._call_of:
            self._account(self._engine.step())

    def _count_again(self) -> None:
        if not (self._call_of or self._abandoned) and self._engine.has_unfinished_requests():
            raise RequestError("llm_engine has unfinished requests: call llm_engine.step() until they have ended")
        self._call_of = {}
        for call in self._calls:
            unfinished = [output for output in call.outputs if not output.finished]
            self._call_of |= dict.fromkeys((output.request_id for output in unfinished), call)
            call.num_unfinished = len(unfinished)

    def _carry_out(self, call: Call) -> None:
        while call.orders and call.failure is None:
            request_id, order = call.orders[0]
            if call.begun == request_id:  # it was cut short, and the engine may have the request
                self._engine.abort(request_id)
            call.begun = request_id or None
            try:
                output = order()
            except Exception as error:
                call.failure = error
                break
            if output is not None:
                call.outputs.append(output)
                if not output.finished:
                    self._call_of[output.request_id] = call
                    call.num_unfinished += 1
            call.begun = None
            call.orders.popleft()
        if call.is_done:
            call.news.put(None)

    def _account(self, outputs: list[RequestOutput]) -> None:
        """Tell calls what a step has ended."""
        told = dict[Call, None]()
        for output in outputs:
            if output.finished and (call := self._call_of.pop(output.request_id, None)):
                call.num_unfinished -= 1
                call.finished.put(output)
                told[call] = None
        for call in told:
            call.news.put(None)

    def _abort(self, call: Call) -> None:
        """End what the engine has of a call."""
        added = [output.request_id for output in call.outputs if not output.finished]
        for request_id in [*added, *([call.begun] if call.begun else [])]:
            self._engine.abort(request_id)
            self._call_of.pop(request_id, None)
        call.num_unfinished, call.begun = 0, None

    def _leave(self, call: Call) -> None:
        """Take out a call, whatever has ended it, and let the next one lead."""
        try:
            if call.has_requests and self._leads(call):
                self._abort(call)
        finally:
            if call.has_requests:
                self._abandoned.append(call)
            if call in self._calls:
                self._calls.remove(call)
            for each in self._calls[:1]:
                each.news.put(None)


def _drain(queue: SimpleQueue[RequestOutput]) -> list[RequestOutput]:
    found = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found
