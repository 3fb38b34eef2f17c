"""An engine in a thread of its own, with an inbox that any thread may write to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvllm.core.engine import LLMEngine

Order = Callable[[LLMEngine], None]


class EngineLoop:
    """Steps an engine as long as it has unfinished requests. No other thread may use the engine.

    on_step: called in the loop's thread after orders were executed, and after every step.
    failure: the error that ended the loop. An order handles its own errors, because one that it raises ends the loop.
    """

    def __init__(self, engine: LLMEngine, on_step: Callable[[], None]) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._on_step = on_step
        self._inbox: list[Order] = []
        self._idle = True
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="kvllm-engine", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether no order waits and no request is unfinished."""
        return self._idle

    def submit(self, order: Order) -> None:
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

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except BaseException as error:
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._idle)
            orders, self._inbox = self._inbox, []
        for order in orders:
            order(self.engine)
        if self.engine.has_unfinished_requests():
            self.engine.step()
        self._on_step()
        with self._changed:
            self._idle = not self._inbox and not self.engine.has_unfinished_requests()
            if self._idle:
                self._changed.notify_all()
