"""The executor of one rank in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvllm.core.executor import Executor
from kvllm.core.protocol import StepPlan, StepResult, decode_plan, decode_result, encode
from kvllm.worker.launched import Launched
from kvllm.worker.model_runner import ModelRunner, Run
from kvllm.worker.threads import operators_alone

MakeResult = Callable[[], StepResult]


@dataclass
class _Step:
    """run: once it is prepared. made: what makes its result, once it has ended."""

    plan: StepPlan
    run: Run | None = None
    made: Future[MakeResult] = field(default_factory=Future)


class StepThread:
    """Runs plans one after the other.

    From the end of a pass to the beginning of the next nothing is computed, so as little as possible happens there:

    - A plan that decodes the same sequences once more is prepared by whoever launches it, while the one before is run.
      Only the tokens are missing.
    - A result is handed over when the pass of the next step begins, if a plan that only decodes is queued: whoever
      waits for it takes the interpreter's lock. A plan that does more may take long to get there, and does not keep
      results back.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "kvllm-worker")
        self._queued: deque[_Step] = deque()
        self._last: _Step | None = None  # that was launched
        self._ended: list[Callable[[], None]] = []  # hand over the results of steps that have ended

    def launch(self, plan: StepPlan) -> Future[MakeResult]:
        """Queue a plan. What comes of it makes the plan's result."""
        step = _Step(plan)
        if self._last and self._last.run and self._runner.follows(plan):
            step.run = self._runner.prepare(plan)
        self._last = step
        self._queued.append(step)
        self._thread.submit(self._run)
        return step.made

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self) -> None:
        """Run all that is queued."""
        with operators_alone():
            while self._queued:
                step = self._queued.popleft()
                try:
                    result = self._execute(step)
                except BaseException as error:
                    self._ended.append(partial(step.made.set_exception, error))
                else:
                    self._ended.append(partial(step.made.set_result, result))
                if not self._queued:
                    self._hand_over()

    def _execute(self, step: _Step) -> MakeResult:
        if not step.plan.only_decodes:
            self._hand_over()
        if step.run is None:
            step.run = self._runner.prepare(step.plan)
        return _result_of(step.run(self._hand_over))

    def _hand_over(self) -> None:
        while self._ended:
            self._ended.pop(0)()


def _result_of(launched: Launched) -> MakeResult:
    """Another thread makes the result while the next plan is run, unless it reads what that one changes."""
    if not launched.complete:
        return launched.result
    result = launched.result()
    return lambda: result


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
