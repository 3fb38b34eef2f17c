"""One engine for the calls of several threads, each of which waits for the outputs of its own requests."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from kvllm.core.engine_loop import EngineLoop, Steppable
from kvllm.errors import RequestError
from kvllm.outputs import RequestOutput

LONGEST_WAIT = 1.0
"""Seconds after which a waiting call looks for itself whether the loop has failed."""
Order = Callable[[], RequestOutput]
"""Adds a request to the engine and returns its output, or does something else and returns one that is finished."""
News = SimpleQueue[list[RequestOutput] | BaseException]
"""Of a call: outputs that have ended, or what has ended all of its requests."""


class Engine(Steppable, Protocol):
    """The part of an engine that calls use. See LLMEngine."""

    def abort(self, request_id: str) -> None: ...


class SharedEngine(EngineLoop[Engine]):
    """Runs the requests of several threads' calls together. An error of a step ends the oldest call alone.

    An interrupt, which only a call's own thread gets, cannot reach the engine.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, self._tell)
        self._calls: dict[str, News] = {}  # of unfinished requests

    def run(
        self, orders: list[tuple[str, Order]], on_finished: Callable[[list[RequestOutput]], None]
    ) -> list[RequestOutput]:
        """Carry out orders, and wait until their requests have ended.

        Args:
            orders: each with the id of its request. They run between two steps, in the loop's thread.
            on_finished: called in this thread with the requests that have ended, as steps go on.

        Returns:
            The outputs, in the order of the orders.

        Raises:
            RequestError: the engine has requests that somebody else has added. Else what an order, a step or
                `on_finished` raises: the unfinished requests are then aborted.
        """
        news, outputs, num_left = News(), list[RequestOutput](), len(orders)
        try:
            self.submit(lambda _: self._begin(orders, outputs, news))
            while num_left:
                finished = self._next(news)
                num_left -= len(finished)
                on_finished(finished)
        finally:
            if num_left:
                self.submit(lambda _: self._end(news))
        return outputs

    def _next(self, news: News) -> list[RequestOutput]:
        while self.failure is None:
            try:
                found = news.get(timeout=LONGEST_WAIT)
            except Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        raise self.failure

    # In the loop's thread

    def _begin(self, orders: list[tuple[str, Order]], outputs: list[RequestOutput], news: News) -> None:
        try:
            if not self._calls and self.engine.has_unfinished_requests():
                raise RequestError("llm_engine has unfinished requests: call llm_engine.step() until they have ended")
            for request_id, order in orders:
                self._calls[request_id] = news
                outputs.append(order())
            self._tell(outputs)
        except BaseException as error:
            self._end(news, error)

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Tell calls which of their requests have ended."""
        told: dict[News, list[RequestOutput]] = {}
        for output in outputs:
            if output.finished and (news := self._calls.pop(output.request_id, None)):
                told.setdefault(news, []).append(output)
        for news, finished in told.items():
            news.put(finished)

    def _end(self, news: News, error: BaseException | None = None) -> None:
        """Abort the requests of a call."""
        for request_id in [each for each, owner in self._calls.items() if owner is news]:
            del self._calls[request_id]
            self.engine.abort(request_id)
        if error:
            news.put(error)

    def _turn(self) -> bool:
        try:
            return super()._turn()
        except BaseException as error:
            if not self._calls:
                raise
            self._end(next(iter(self._calls.values())), error)
            return True

    def _has_work(self) -> bool:
        return bool(self._calls)
