"""The executor of one rank in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvllm.core.executor import Executor
from kvllm.core.protocol import StepPlan, StepResult, decode_plan, decode_result, encode
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.step_thread import StepThread


class InlineExecutor(Executor):
    """Runs the model in this process. Plans and results still pass through their encoding, so that core and worker
    share no object: what works here works across processes.

    Tokens of a step in flight go into the next one without a detour: on a GPU on the device.

    in_thread: let a thread of its own run the model, so that `launch` returns at once on a CPU, too.
    """

    fills_pending = True

    def __init__(self, runner: ModelRunner, *, in_thread: bool = False) -> None:
        self.runner = runner
        self._thread = StepThread(runner) if in_thread else None
        self._in_flight: deque[Callable[[], StepResult]] = deque()

    def launch(self, plan: StepPlan) -> None:
        if plan.reset:
            self._in_flight.clear()
        plan = decode_plan(encode(plan))
        if self._thread:
            execution = self._thread.launch(plan)
            self._in_flight.append(lambda: execution.result()())
        else:
            self._in_flight.append(self.runner.launch(plan).result)

    def collect(self) -> StepResult:
        return decode_result(encode(self._in_flight.popleft()()))

    def close(self) -> None:
        """Return when the worker needs no time any more. Memory goes with the object."""
        if self._thread:
            self._thread.close()
        for feature in self.runner.features:
            feature.close()


def make_executor(runner: ModelRunner, *, async_scheduling: bool) -> InlineExecutor:
    """A GPU executes what was launched on its own. On a CPU it takes a thread to plan meanwhile."""
    return InlineExecutor(runner, in_thread=async_scheduling and runner.device.type == "cpu")
