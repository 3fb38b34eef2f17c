"""The difference between a worker that hangs and one that works."""

from __future__ import annotations


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
