"""An engine in a thread of its own, with an inbox that any thread may write to."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from kvllm.outputs import RequestOutput


class Steppable(Protocol):
    """The part of an engine that the loop calls. See LLMEngine."""

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...


E = TypeVar("E", bound=Steppable)


class EngineLoop(Generic[E]):
    """Steps an engine in a thread of its own, as long as it has unfinished requests. No other thread may use the engine
    meanwhile. Between two times of work, the thread keeps nothing alive.

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
        self._inbox = deque[Callable[[E], None]]()
        self._is_at_work = False
        self._stopping = False
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._start()

    @property
    def is_idle(self) -> bool:
        """Whether no order waits and no request is unfinished."""
        return not (self._inbox or self._is_at_work)

    def submit(self, order: Callable[[E], None]) -> None:
        """Let the loop's thread call `order` with the engine, before its next step. No interrupt leaves a lock held."""
        self._inbox.append(order)
        self._wake()

    def wait(self, seconds: float) -> None:
        """Return when everything is done, or after a while. Raises what has ended the loop."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle or self.failure, seconds)
            if self.failure:
                raise self.failure

    def stop(self) -> None:
        """End the thread after the step that it is at. Requests stay unfinished, and orders unread."""
        self._stopping = True
        self._bell.put(False)
        self._thread.join()

    def _start(self) -> None:
        self._bell = SimpleQueue[bool]()  # False: the thread is to end
        arguments = weakref.ref(self), self._bell
        self._thread = threading.Thread(target=_serve, args=arguments, name="kvllm-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._bell.put, False)

    def _wake(self) -> None:
        if not (self._thread.is_alive() or self._stopping):  # this process is a fork
            with self._starting:
                if not self._thread.is_alive():
                    self._start()
        self._bell.put(True)

    def _run(self) -> None:
        self._is_at_work = True
        atexit.register(self.stop)  # a thread that is at work while the interpreter ends would crash it
        try:
            while not self._stopping and self.failure is None and self._turn():
                pass
        except BaseException as error:
            self._fail(error)
        finally:
            atexit.unregister(self.stop)
            with self._changed:
                self._is_at_work = False
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self._on_failure()

    def _turn(self) -> bool:
        """Carry out the orders and take a step. Returns whether there is more to do."""
        for _ in range(len(self._inbox)):
            self._inbox.popleft()(self.engine)
        outputs = self.engine.step() if self._has_work() else []
        has_work = self._has_work()  # whoever waits for these outputs may then use the engine
        self._on_step(outputs)
        return has_work or bool(self._inbox)

    def _has_work(self) -> bool:
        return self.engine.has_unfinished_requests()


def _serve(loop: weakref.ref[EngineLoop[Any]], bell: SimpleQueue[bool]) -> None:
    while bell.get():
        if found := loop():
            found._run()
        del found
