"""How a worker that hangs is told from one that works."""

from __future__ import annotations


class HangDetector:
    """When a worker was last heard of, and when it last got further. It says how far it is, in whatever unit.

    silence, standstill: seconds without a word, or without progress, after which it hangs. heard: when it last was.
    """

    def __init__(self, silence: float, standstill: float, now: float) -> None:
        self.silence = silence
        self.standstill = standstill
        self.heard = self._advanced = now
        self._progress: bytes | int | None = None

    def hear(self, now: float, progress: bytes | int | None = None) -> None:
        """It said something: that it is where `progress` is, or (None) something that it had to get on for."""
        self.heard = now
        if progress is None or progress != self._progress:
            self._advanced, self._progress = now, progress

    def complaint(self, now: float) -> str | None:
        """What is wrong with it, if anything is."""
        if now - self.heard > self.silence:
            return f"hangs: silent for {self.silence:g} s"
        if now - self._advanced > self.standstill:
            return f"hangs: no progress for {self.standstill:g} s"
        return None
