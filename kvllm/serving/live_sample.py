"""One sample of the live page: figures of the pool, the queue, the counters and the latencies at one moment."""

from __future__ import annotations

from msgspec import Struct

from kvllm.core.snapshot import EngineSnapshot


class Sample(Struct, array_like=True, frozen=True):
    """Seconds are rounded to 0.1 ms. Counters are those since the engine started: they fall when it starts again.

    time: seconds since 1970.
    prompt ... without_compression: blocks, see `kvllm.core.snapshot.PoolUse`; `prompt` has those of sliding groups.
    running, waiting: sequences.
    steps ... evicted: counters, see `kvllm.stats.EngineStats`.
    model_seconds ... compact_seconds: counters of a step's phases.
    first_p50 ... gap_p99: seconds to the first token, and between tokens; None if there were none of late.
    """

    time: float
    prompt: int
    compressed: int
    tail: int
    reusable: int
    free: int
    without_compression: int
    running: int
    waiting: int
    steps: int
    output_tokens: int
    preemptions: int
    tokens_recomputed: int
    windows: int
    evicted: int
    model_seconds: float
    recompute_seconds: float
    score_seconds: float
    compact_seconds: float
    first_p50: float | None
    first_p99: float | None
    gap_p50: float | None
    gap_p99: float | None


Percentiles = tuple[float | None, float | None]


def make_sample(time: float, snapshot: EngineSnapshot, first: Percentiles, gap: Percentiles) -> Sample:
    """first, gap: median and 99th percentile."""
    pool, stats = snapshot.pool, snapshot.stats
    return Sample(
        round(time, 2),
        pool.prompt + pool.sliding,
        pool.compressed,
        pool.tail,
        pool.reusable,
        pool.free,
        pool.without_compression,
        snapshot.running,
        snapshot.waiting,
        stats.steps,
        stats.output_tokens,
        stats.preemptions,
        stats.tokens_recomputed,
        stats.windows_compressed,
        stats.entries_evicted,
        round(stats.prefill_seconds + stats.decode_seconds, 4),
        round(stats.recompute_seconds, 4),
        round(stats.score_seconds, 4),
        round(stats.compact_seconds, 4),
        *first,
        *gap,
    )
