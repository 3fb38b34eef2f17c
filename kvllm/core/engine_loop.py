"""An engine in a thread of its own, with an inbox that any thread may write to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvllm.outputs import RequestOutput


class Steppable(Protocol):
    """The part of an engine that the loop calls. See LLMEngine."""

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


E = TypeVar("E", bound=Steppable)


class EngineLoop(Generic[E]):
    """Steps an engine as long as it has unfinished requests. No other thread may use the engine.

    on_step: called in the loop's thread with what `step` has returned, or with nothing after orders alone.
    on_failure: called in the loop's thread when an error has ended the loop.
    failure: that error. An order handles its own errors, because one that it raises ends the loop.
    """

    def __init__(
        self, engine: E, on_step: Callable[[list[RequestOutput]], None], on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._on_step = on_step
        self._on_failure = on_failure
        self._inbox: list[Callable[[E], None]] = []
        self._idle = True
        self._stopping = False
        self._changed = threading.Condition()
        self._start()

    @property
    def is_idle(self) -> bool:
        """Whether no order waits and no request is unfinished."""
        return self._idle

    def submit(self, order: Callable[[E], None]) -> None:
        """Let the loop's thread call `order` with the engine, before its next step."""
        with self._changed:
            self._inbox.append(order)
            self._idle = False
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Return when everything is done, or after a while. Raises what has ended the loop."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self.failure, seconds)
            if self.failure:
                raise self.failure

    def stop(self) -> None:
        """End the thread after the step that it is at. Requests stay unfinished, and orders unread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvllm-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self._on_failure()

    def _turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._idle or self._stopping)
            orders, self._inbox = self._inbox, []
        for order in orders:
            order(self.engine)
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        self._on_step(outputs)
        with self._changed:
            self._idle = not self._inbox and not self.engine.has_unfinished_requests()
            if self._idle:
                self._changed.notify_all()
