"""Which compressions a method learns from that learns while the engine runs."""

from __future__ import annotations

from kvllm.compression.specs import MethodSpec

FIRST_WINDOWS = 8
"""An engine's first windows, all of which are learned from: about enough for a map."""
EVERY = 32
"""One window in so many is learned from after these, so that the map follows the texts."""


class LearningTurns:
    """Counts windows, and names the compressions that compute their queries again to learn from them.

    learns_now: whether the next compression should. That depends on counts alone, so a plan never waits for the
        workers.
    """

    def __init__(self, spec: MethodSpec) -> None:
        self._learns = spec.learns
        self._seen = 0
        self._next = 0  # the window from which on the next compression is learned from

    @property
    def learns_now(self) -> bool:
        return self._learns and self._seen >= self._next

    def count(self, num_windows: int, learns: bool) -> None:
        """A compression of so many windows is planned. learns: whether it is learned from."""
        if learns:
            begun = self._seen + num_windows < FIRST_WINDOWS
            self._next = self._seen + (num_windows if begun else EVERY)
        self._seen += num_windows
