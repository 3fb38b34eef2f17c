"""Confidence intervals of proportions, and paired differences of answers to the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, mean

from msgspec import Struct
from scipy.stats import binomtest

CONFIDENCE = 0.95


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's confidence interval of a proportion."""
    found = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return found.low, found.high


def percent(right: Sequence[bool]) -> str:
    """The share of right answers in percent, with its interval."""
    low, high = interval(sum(right), len(right))
    return f"{100 * mean(right):.1f} [{100 * low:.0f}, {100 * high:.0f}]"


class Difference(Struct, frozen=True):
    """The difference of two trials in right answers to the same questions.

    mean, half_width: the first trial minus the second, with its confidence interval. p_value: the probability that
    equal methods differ as much (McNemar's exact test).
    """

    mean: float
    half_width: float
    p_value: float

    @property
    def text(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f}"


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Difference:
    differences = [int(a) - int(b) for a, b in zip(first, second, strict=True)]
    n, average = len(differences), mean(differences)
    variance = sum((d - average) ** 2 for d in differences) / max(1, n - 1)
    half_width = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * sqrt(variance / n)
    wins, losses = differences.count(1), differences.count(-1)
    p_value = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Difference(average, half_width, p_value)
