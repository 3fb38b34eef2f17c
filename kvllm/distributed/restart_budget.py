"""How often lost workers are replaced."""

from __future__ import annotations

import logging

from kvllm.errors import WorkerError

logger = logging.getLogger(__name__)

STEPS_FOR_NEW_BUDGET = 1000
"""So many steps without a fault, and as many restarts as in the beginning are allowed again."""


class RestartBudget:
    """Allows `most` restarts. failure: the error after which none is allowed."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._spent = self._good_steps = 0
        self.failure: WorkerError | None = None

    def check(self) -> None:
        """Raises the failure, if there was one."""
        if self.failure:
            raise self.failure

    def spend(self, fault: WorkerError) -> None:
        """Allow one more restart. Raises WorkerError if it would be one too many."""
        self._good_steps = 0
        if self._spent == self.most:
            self.failure = WorkerError(f"the workers failed again after {self._spent} restarts: {fault}")
            raise self.failure from fault
        self._spent += 1
        logger.warning("restart %d of at most %d: %s", self._spent, self.most, fault)

    def count(self, steps: int) -> None:
        """So many steps went well."""
        self._good_steps += steps
        if self._good_steps >= STEPS_FOR_NEW_BUDGET:
            self._spent = 0
