"""A rank between its connection and a device that is still at work on a step."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from kvllm.core.protocol import SampledToken, StepPlan, StepResult, decode_result, encode
from kvllm.distributed.channel import Channel
from kvllm.distributed.rank import _run_plans
from tests.helpers.waiting import wait_until


class Step:
    """A step of a device, with a token that tells it from others."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.over = False

    def is_due(self) -> bool:
        return self.over

    def result(self) -> StepResult:
        return StepResult([SampledToken(self.number)])


class Runner:
    samples = True

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def launch(self, plan: StepPlan) -> Step:
        self.steps.append(Step(len(self.steps)))
        return self.steps[-1]


def test_a_plan_is_launched_while_the_device_is_at_work() -> None:
    """Results come in order, each as soon as its step is over, whether another plan is there or not. After a reset
    those of the steps before it are not wanted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Channel(socket.create_connection(server.getsockname()))
        theirs = Channel(server.accept()[0])
    runner, busy = Runner(), threading.Event()

    def run() -> None:
        with suppress(EOFError):
            _run_plans(theirs, runner, busy)  # pyright: ignore[reportArgumentType]

    def launch(number: int, *, reset: bool = False) -> Step:
        ours.send(number, encode(StepPlan(reset=reset)))
        wait_until(lambda: len(runner.steps) == number, "the launch")
        return runner.steps[-1]

    def received() -> tuple[int, int]:
        number, message = ours.receive()
        return number, decode_result(message).tokens[0].token_id

    thread = threading.Thread(target=run)
    thread.start()
    first, second = launch(1), launch(2)
    second.over = True
    assert not ours.has_message(0.01) and busy.is_set()
    first.over = True
    assert [received(), received()] == [(1, 0), (2, 1)]
    wait_until(lambda: not busy.is_set(), "the end of all steps")
    lost = launch(3)
    launch(4, reset=True).over = True
    assert received() == (4, 3)
    lost.over = True
    assert not ours.has_message(0.01)
    ours.close()
    thread.join(10)
    assert not thread.is_alive()
