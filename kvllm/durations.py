"""A distribution of durations in a fixed room: how many of them fell into each of some buckets."""

from __future__ import annotations

from itertools import accumulate
from math import ceil, log2
from operator import add

from msgspec import Struct, field

LEAST_SECONDS = 2.0**-17
"""The bound of the first bucket, 8 us."""
STEPS = 8
"""Buckets in which the bound doubles: one is 9% above the one before."""
NUM_BUCKETS = 1 + 27 * STEPS
"""So the last bound is 1024 s."""


class Durations(Struct):
    """Durations in seconds, counted in buckets whose bounds are a geometric series.

    counts: how many there are in each bucket; the last one has all that are longer, too.
    total, longest: their sum, and the longest of them.
    """

    counts: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float, number: int = 1) -> None:
        """Count a duration `number` times."""
        bucket = ceil(STEPS * log2(seconds / LEAST_SECONDS)) if seconds > LEAST_SECONDS else 0
        self.counts[min(bucket, NUM_BUCKETS - 1)] += number
        self.total += number * seconds
        self.longest = max(self.longest, seconds)

    def __add__(self, other: Durations) -> Durations:
        return Durations(
            list(map(add, self.counts, other.counts)), self.total + other.total, max(self.longest, other.longest)
        )

    def __copy__(self) -> Durations:
        return Durations(self.counts[:], self.total, self.longest)

    def __repr__(self) -> str:
        """Without the buckets."""
        shown = f"number={sum(self.counts)}, p50={self.p50:.4g}, p99={self.p99:.4g}, longest={self.longest:.4g}"
        return f"Durations({shown})"

    @property
    def p50(self) -> float:
        """The median, to the bound of its bucket; 0 of none."""
        return self._percentile(50)

    @property
    def p99(self) -> float:
        """The 99th percentile, to the bound of its bucket; 0 of none."""
        return self._percentile(99)

    def cumulative(self, steps: int = STEPS) -> list[tuple[float, int]]:
        """Every `steps`-th bound but the last, and how many durations are not above it."""
        ends = list(accumulate(self.counts))
        return [(LEAST_SECONDS * 2 ** (i / STEPS), ends[i]) for i in range(0, NUM_BUCKETS - 1, steps)]

    def _percentile(self, percent: int) -> float:
        ends = list(accumulate(self.counts))
        rank = max(1, ceil(percent * ends[-1] / 100))
        bucket = next((i for i, end in enumerate(ends) if end >= rank), 0)
        return min(self.longest, LEAST_SECONDS * 2 ** (bucket / STEPS))
