"""Times to first tokens and gaps between tokens of the last seconds, and their percentiles."""

from __future__ import annotations

from collections import deque
from itertools import repeat

import numpy as np

PERIODS = 20
MOST_HELD = 100_000
"""Of a period that is still open: where nobody looks at the live page, it may never end."""
MOST_VALUES = 500
"""Of a period that count: each k-th one where there are more, for percentiles of a few thousand are as good."""


class Latencies:
    """Seconds, of the last PERIODS periods. All is used on the event loop."""

    def __init__(self) -> None:
        self._current: deque[float] = deque(maxlen=MOST_HELD)
        self._periods: deque[np.ndarray] = deque(maxlen=PERIODS)

    def add(self, seconds: float, number: int = 1) -> None:
        """Count a time `number` times."""
        self._current.extend(repeat(seconds, number))

    def end_period(self) -> tuple[float | None, float | None]:
        """The median and the 99th percentile, None if there is no value; then a new period begins."""
        current = np.fromiter(self._current, np.float64, len(self._current))
        self._periods.append(current[:: len(current) // MOST_VALUES + 1])
        self._current.clear()
        values = np.concatenate(self._periods)
        if not len(values):
            return None, None
        median, slow = np.percentile(values, (50, 99))
        return round(float(median), 5), round(float(slow), 5)
