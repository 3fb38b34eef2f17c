"""What a loop leaves behind: no memory, no hang in a fork, and no step that the end of the interpreter cuts short."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from queue import SimpleQueue

import pytest

from kvllm.core.engine_loop import EngineLoop
from kvllm.outputs import RequestOutput


class Countdown:
    """An engine with a request of so many steps."""

    steps = 0
    owner: object = None

    def has_unfinished_requests(self) -> bool:
        return self.steps > 0

    def step(self) -> list[RequestOutput]:
        time.sleep(0.1)
        self.steps -= 1
        return []


@pytest.fixture
def loop() -> EngineLoop[Countdown]:
    loop = EngineLoop(Countdown(), lambda _: None)
    loop.submit(lambda engine: setattr(engine, "steps", 1))
    loop.wait(10)
    return loop


def test_nobody_keeps_an_idle_engine() -> None:
    loop = EngineLoop(Countdown(), lambda _: None)
    loop.engine.owner = loop
    loop.submit(lambda _: None)
    loop.wait(10)
    thread, engine = loop._thread, weakref.ref(loop.engine)
    del loop
    for _ in range(100):  # the thread may have to let go
        gc.collect()
        thread.join(0.01)
        if not thread.is_alive():
            break
    assert engine() is None and not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_a_thread_of_its_own(loop: EngineLoop[Countdown]) -> None:
    child = os.fork()
    if not child:
        done: SimpleQueue[None] = SimpleQueue()
        loop.submit(lambda _: done.put(None))
        done.get(timeout=5)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_interpreter_ends_after_a_step() -> None:
    script = """
from tests.core.test_engine_loop import *
loop = EngineLoop(Countdown(), lambda _: print("stepped", flush=True))
loop.submit(lambda engine: setattr(engine, "steps", 1000))
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "stepped\n"
