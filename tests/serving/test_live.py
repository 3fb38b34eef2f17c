"""Warnings and percentiles of the live page."""

from __future__ import annotations

from msgspec import structs

from kvllm.core.snapshot import EngineSnapshot, PoolUse
from kvllm.serving.live_feed import MOST_VALUES, PERIODS, Latencies, Sample, find_warnings, make_sample
from kvllm.stats import EngineStats

IDLE = make_sample(0.0, EngineSnapshot(PoolUse(100), EngineStats(100), 0, 0, "", {}, []), (None, None), (None, None))


def samples(seconds: int, **last: int) -> list[Sample]:
    """Two a second, all with `waiting`, and counters that reach `last` at the end."""
    waiting = last.pop("waiting", 0)
    first = [structs.replace(IDLE, time=i / 2, waiting=waiting) for i in range(2 * seconds)]
    return [*first, structs.replace(IDLE, time=float(seconds), waiting=waiting, **last)]


def test_no_warning_without_a_reason() -> None:
    busy = samples(60, waiting=3, preemptions=2, tokens_recomputed=900, output_tokens=9000)
    assert find_warnings(busy, "a place: 4 sequences run, which is the most", {"a": 3}) == []


def test_an_engine_that_computes_much_again_thrashes() -> None:
    (warning,) = find_warnings(samples(60, preemptions=7, tokens_recomputed=900, output_tokens=5000), "", {})
    assert warning.startswith("The engine thrashes: 7 preemptions") and "900" in warning and "--max-num-seqs" in warning
    assert find_warnings(samples(60, preemptions=7, tokens_recomputed=900, output_tokens=50_000), "", {}) == []


def test_a_pool_is_too_small_if_requests_wait_for_blocks_for_long() -> None:
    (warning,) = find_warnings(samples(20, waiting=5), "blocks: 9 are missing in the pool", {"a": 5})
    assert "5 wait for blocks" in warning
    assert find_warnings(samples(5, waiting=5), "blocks: 9 are missing in the pool", {"a": 5}) == []


def test_a_key_that_fills_the_queue_is_named() -> None:
    (warning,) = find_warnings(samples(1), "a place", {"alice": 17, "bob": 3})
    assert "'alice'" in warning and "17 of 20" in warning
    assert find_warnings(samples(1), "a place", {"alice": 10, "bob": 10}) == []
    assert find_warnings(samples(1), "a place", {"alice": 20}) == []


def test_percentiles_are_those_of_the_last_periods() -> None:
    latencies = Latencies()
    assert latencies.end_period() == (None, None)
    for value in range(101):
        latencies.add(value / 100)
    assert latencies.end_period() == (0.5, 0.99)
    for _ in range(PERIODS - 1):
        assert latencies.end_period() == (0.5, 0.99)
    assert latencies.end_period() == (None, None)


def test_percentiles_of_many_values_are_those_of_a_part() -> None:
    latencies = Latencies()
    for value in range(50 * MOST_VALUES):
        latencies.add(value / 50 / MOST_VALUES)
    median, slow = latencies.end_period()
    assert median is not None and slow is not None
    assert abs(median - 0.5) < 0.01 and abs(slow - 0.99) < 0.01


def test_tokens_that_came_together_count_one_by_one() -> None:
    latencies = Latencies()
    latencies.add(1.0)
    latencies.add(0.25, 3)
    assert latencies.end_period()[0] == 0.25


def test_a_sample_counts_drafts() -> None:
    stats = EngineStats(100)
    stats.drafts.add(4, 3)
    stats.drafts.add(2, 0)
    sample = make_sample(0.0, EngineSnapshot(PoolUse(100), stats, 0, 0, "", {}, []), (None, None), (None, None))
    assert (sample.drafts, sample.drafted, sample.drafts_right) == (2, 6, 3)
