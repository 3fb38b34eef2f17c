"""How the core reaches its workers: one plan out, one result back."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvllm.core.protocol import StepPlan, StepResult


class WorkersRestarted(Exception):
    """The last plan is lost, and so is all that the workers knew: sequences and cache. New workers are ready."""


class Executor(ABC):
    """Runs plans on all ranks. One plan is in flight at a time."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Send the encoded plan to every rank and return the result of rank 0."""

    @abstractmethod
    def close(self) -> None:
        """Release workers and memory. Idempotent."""
