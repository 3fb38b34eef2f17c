"""A distribution of durations in buckets against the durations themselves."""

from __future__ import annotations

import random
from copy import copy

import pytest

from kvllm.durations import Durations
from kvllm.stats import EngineStats


def durations_of(seconds: list[float]) -> Durations:
    found = Durations()
    for each in seconds:
        found.add(each)
    return found


def test_percentiles_are_within_a_tenth() -> None:
    rng = random.Random(0)
    seconds = [10 ** rng.uniform(-5, 2.9) for _ in range(5000)]
    found = durations_of(seconds)
    ranked = sorted(seconds)
    for percentile, exact in ((found.p50, ranked[2499]), (found.p99, ranked[4949])):
        assert exact <= percentile <= 1.1 * exact
    assert found.longest == ranked[-1] and found.total == pytest.approx(sum(seconds))
    for bound, count in found.cumulative():
        assert count == sum(each <= bound for each in seconds)


def test_what_lies_outside_of_the_buckets_is_counted() -> None:
    assert (Durations().p50, Durations().p99, Durations().longest) == (0, 0, 0)
    found = durations_of([0.0, 0.0, 5000.0])
    assert found.p50 == pytest.approx(0, abs=1e-5) and sum(found.counts) == 3
    assert found.cumulative()[-1][1] == 2
    assert durations_of([0.3] * 3).p99 == 0.3  # a bucket's bound, unless the longest is below


def test_sums_and_copies() -> None:
    first, second = durations_of([0.125, 0.25]), durations_of([0.5])
    assert first + second == durations_of([0.125, 0.25, 0.5])
    other = copy(first)
    first.add(0.375, 2)
    assert other == durations_of([0.125, 0.25]) and first == durations_of([0.125, 0.25, 0.375, 0.375])


def test_what_is_printed_fits_on_a_screen() -> None:
    stats = EngineStats(num_blocks=100)
    stats.stalls.add(0.125, 3)
    for _ in range(1000):
        stats.record_step(running=7, blocks=50)
    assert repr(stats.stalls) == "Durations(number=3, p50=0.125, p99=0.125, longest=0.125)"
    printed = repr(stats)
    assert "num_blocks=100" in printed and "steps=1000" in printed and repr(stats.stalls) in printed
    assert len(printed) < 2000
