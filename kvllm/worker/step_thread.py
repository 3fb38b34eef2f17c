"""A thread that runs plans, so that a CPU computes a step while the next one is planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvllm.core.protocol import StepPlan, StepResult
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
