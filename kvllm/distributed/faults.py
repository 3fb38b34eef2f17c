"""Faults of workers: how a hang is told from work, and how often lost ones are replaced."""

from __future__ import annotations

import logging

from kvllm.errors import WorkerError


class HangDetector:
    """The times of a worker's last message and of its last progress, which its messages carry in any unit.

    silence, standstill: seconds without a word, or without progress, after which it hangs. heard: when it last was.
    """

    def __init__(self, silence: float, standstill: float, now: float) -> None:
        self.silence = silence
        self.standstill = standstill
        self.heard = self._advanced = now
        self._progress: bytes | int | None = None

    def hear(self, now: float, progress: bytes | int | None = None) -> None:
        """A message came: one that carries `progress`, or (None) one that proves progress itself."""
        self.heard = now
        if progress is None or progress != self._progress:
            self._advanced, self._progress = now, progress

    def complaint(self, now: float) -> str | None:
        """The reason why the worker counts as hanging, or None."""
        if now - self.heard > self.silence:
            return f"hangs: silent for {self.silence:g} s"
        if now - self._advanced > self.standstill:
            return f"hangs: no progress for {self.standstill:g} s"
        return None


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
