"""How the core reaches its workers: one plan out, one result back."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvllm.core.protocol import StepPlan, StepResult


class WorkersRestarted(Exception):
    """The last plan is lost, and so is all that the workers knew: sequences and cache. New workers are ready."""


class Executor(ABC):
    """Runs plans on all ranks, one after the other. The caller is free between `launch` and `collect`.

    A plan with `reset` drops the results that an exception has kept from being collected.

    fills_pending: whether a plan may be launched before the one in flight is collected. Its new tokens may then be
        PENDING, which stands for what that one samples for the sequence. Otherwise one plan is in flight at a time.
    """

    fills_pending = False

    @abstractmethod
    def launch(self, plan: StepPlan) -> None:
        """Send the encoded plan to every rank. It may still be executed when this returns."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Wait for the first launched plan that was not collected. Returns the result of rank 0."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan to its end."""
        self.launch(plan)
        return self.collect()

    @abstractmethod
    def close(self) -> None:
        """Release workers and memory. Idempotent."""


class BlockingExecutor(Executor):
    """Executes a plan while it is launched: for executors that account for each plan after it."""

    _result = StepResult()

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan to its end."""

    def launch(self, plan: StepPlan) -> None:
        self._result = self.execute(plan)

    def collect(self) -> StepResult:
        return self._result
