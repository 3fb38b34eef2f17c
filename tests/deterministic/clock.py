"""Time that passes when everything waits, and an event loop and engine threads that live in it."""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from kvllm.core.engine_loop import EngineLoop

MOST_ROUNDS = 100_000


class Stuck(AssertionError):
    """Everything waits, and nothing is left that could wake it."""


class Interrupted(BaseException):
    """Cuts a step short, as Ctrl-C does; the engine is used again."""


class VirtualClock:
    """now: seconds. Nothing but `advance` lets them pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """What the `time` module tells, to the event loop too."""
        with (
            patch.object(time, "monotonic", self.read),
            patch.object(time, "time", self.read),
            patch.object(time, "perf_counter", self.read),
        ):
            yield


class _Selector(selectors.SelectSelector):
    """Waits by letting time pass. There are no files to be ready."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.rounds = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everything waits, and nothing is left that could wake it")
        self.rounds += 1
        if self.rounds > MOST_ROUNDS:
            raise Stuck(f"the event loop has not come to its end after {MOST_ROUNDS} rounds")
        self._clock.advance(max(0.0, timeout))
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock. What goes to a thread runs in this one, a while later."""

    def __init__(self, clock: VirtualClock, rng: random.Random) -> None:
        self._waiting = _Selector(clock)
        super().__init__(self._waiting)
        self._rng = rng

    def end(self) -> None:
        """Cancel what is left of a run, and close."""
        self._waiting.rounds = MOST_ROUNDS - 1000
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        with suppress(Stuck):
            self.run_until_complete(_all_done(tasks))
        self.close()

    def _write_to_self(self) -> None:
        """There is no other thread that would have to wake this one."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        self.call_later(self._rng.choice((0.0, 0.001, 0.05)), _settle, future, func, args)
        return future


async def _all_done(tasks: set[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def _settle(future: asyncio.Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)


def simulated_engine_loop(step_seconds: Callable[[], float], after_turn: Callable[[Any], None]) -> type[EngineLoop]:
    """The class of an engine's thread that takes its turns in the event loop instead.

    step_seconds: how long the next turn takes. after_turn: is called with the engine.
    """

    class SimulatedEngineLoop(EngineLoop[Any]):
        _is_due = False

        def _start(self) -> None:
            """The event loop is the thread."""

        def _wake(self) -> None:
            self._take_turn_later()

        def stop(self) -> None:
            self._stopping = True

        @property
        def is_idle(self) -> bool:
            return not self._inbox and not self._has_work()

        def _take_turn_later(self) -> None:
            if not (self._is_due or self._stopping or self.failure):
                self._is_due = True
                asyncio.get_running_loop().call_later(step_seconds(), self._take_turn)

        def _take_turn(self) -> None:
            self._is_due = False
            if self._stopping:
                return
            try:
                self._turn()
                after_turn(self.engine)
            except Interrupted:
                pass
            except AssertionError:
                raise
            except BaseException as error:
                self._fail(error)
            if not self.is_idle:
                self._take_turn_later()

    return SimulatedEngineLoop
