"""What the live page shows: samples, kept for a quarter of an hour, and warnings that are read off them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat

import msgspec
import numpy as np
from msgspec import Struct

from kvllm.core.snapshot import EngineSnapshot, SequenceRow
from kvllm.serving.sse import event

PERIOD_SECONDS = 0.5
HISTORY = int(15 * 60 / PERIOD_SECONDS)
MOST_REFUSALS = 10
Percentiles = tuple[float | None, float | None]
PERIODS = 20
MOST_HELD = 100_000
"""Of a period that is still open: where nobody looks at the live page, it may never end."""
MOST_VALUES = 500
"""Of a period that count: each k-th one where there are more, for percentiles of a few thousand are as good."""


class Sample(Struct, array_like=True, frozen=True):
    """Seconds are rounded to 0.1 ms. Counters are those since the engine started: they fall when it starts again.

    time: seconds since 1970.
    prompt ... without_compression: blocks, see `kvllm.core.snapshot.PoolUse`; `prompt` has those of sliding groups.
    running, waiting: sequences.
    steps ... evicted: counters, see `kvllm.stats.EngineStats`.
    drafts, drafted, drafts_right: counters of drafts, of the tokens in them, and of those that were right.
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
    drafts: int
    drafted: int
    drafts_right: int
    model_seconds: float
    recompute_seconds: float
    score_seconds: float
    compact_seconds: float
    first_p50: float | None
    first_p99: float | None
    gap_p50: float | None
    gap_p99: float | None


class Refusal(Struct, frozen=True):
    """A request that was answered with an error. time: seconds since 1970. reason: what kind of error, no text of the
    request."""

    time: float
    tenant: str
    path: str
    status: int
    reason: str


class Tick(Struct, tag="tick"):
    """Each later event. waiting_for: see EngineSnapshot. refused: the last ones, the newest first."""

    sample: Sample
    requests: list[SequenceRow]
    waiting_for: str
    warnings: list[str]
    refused: list[Refusal]


class Latencies:
    """Seconds, of the last PERIODS periods. All is used on the event loop."""

    def __init__(self) -> None:
        self._current: deque[float] = deque(maxlen=MOST_HELD)
        self._periods: deque[np.ndarray] = deque(maxlen=PERIODS)

    def add(self, seconds: float, number: int = 1) -> None:
        """Count a time `number` times."""
        self._current.extend(repeat(seconds, number))

    def end_period(self) -> Percentiles:
        """The median and the 99th percentile, None if there is no value; then a new period begins."""
        current = np.fromiter(self._current, np.float64, len(self._current))
        self._periods.append(current[:: len(current) // MOST_VALUES + 1])
        self._current.clear()
        values = np.concatenate(self._periods)
        if not len(values):
            return None, None
        median, slow = np.percentile(values, (50, 99))
        return round(float(median), 5), round(float(slow), 5)


class LiveFeed:
    """The samples, and what wakes the viewers. All is used on the event loop.

    first_tokens: seconds from requests to their first tokens. gaps: seconds between tokens.
    """

    def __init__(self) -> None:
        self.history: deque[Sample] = deque(maxlen=HISTORY)
        self.first_tokens, self.gaps = Latencies(), Latencies()
        self.refused: deque[Refusal] = deque(maxlen=MOST_REFUSALS)
        self.viewers = 0
        self.collector: asyncio.Task[None] | None = None
        self.event = b""
        self.ticked = asyncio.Event()

    def send(self, tick: Tick) -> None:
        """Wake the viewers that wait now."""
        if not self.viewers:
            return
        self.event = event(msgspec.json.encode(tick))
        self.ticked.set()
        self.ticked = asyncio.Event()


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
        stats.drafts.drafts,
        stats.drafts.tokens,
        sum(stats.drafts.right),
        round(stats.prefill_seconds + stats.decode_seconds, 4),
        round(stats.recompute_seconds, 4),
        round(stats.score_seconds, 4),
        round(stats.compact_seconds, 4),
        *first,
        *gap,
    )


WINDOW_SECONDS = 60.0
MANY_PREEMPTIONS = 3
MUCH_RECOMPUTED = 0.1
"""Tokens computed again, as a share of those generated."""
LONG_WAIT_SECONDS = 10.0
LONG_QUEUE = 8
MOST_OF_QUEUE = 0.5


def find_warnings(samples: Sequence[Sample], waiting_for: str, waiting_of: Mapping[str, int]) -> list[str]:
    """Sentences, the most urgent first.

    Args:
        samples: of the last WINDOW_SECONDS, oldest first; at least one.
        waiting_for, waiting_of: see `kvllm.core.snapshot.EngineSnapshot`.
    """
    found = [_thrash(samples), _small_pool(samples, waiting_for), _crowd(waiting_of)]
    return [warning for warning in found if warning]


def _thrash(samples: Sequence[Sample]) -> str:
    first, last = samples[0], samples[-1]
    preemptions = last.preemptions - first.preemptions
    recomputed = last.tokens_recomputed - first.tokens_recomputed
    generated = last.output_tokens - first.output_tokens
    if preemptions < MANY_PREEMPTIONS or recomputed < MUCH_RECOMPUTED * generated:
        return ""
    return (
        f"The engine thrashes: {preemptions} preemptions in the last minute threw away {recomputed} computed tokens, "
        f"while {generated} were generated. Run fewer sequences at once (--max-num-seqs), enlarge the pool or drop "
        "more KV pairs."
    )


def _small_pool(samples: Sequence[Sample], waiting_for: str) -> str:
    last = samples[-1]
    lasting = [sample for sample in samples if last.time - sample.time <= LONG_WAIT_SECONDS]
    long_enough = last.time - samples[0].time >= LONG_WAIT_SECONDS
    if not waiting_for.startswith("blocks") or not long_enough or not all(sample.waiting for sample in lasting):
        return ""
    return (
        f"The pool is too small for what is asked: for {LONG_WAIT_SECONDS:.0f} seconds requests have waited, and now "
        f"{last.waiting} wait for blocks. Enlarge the pool (--kv-cache-memory-bytes) or drop more KV pairs."
    )


def _crowd(waiting_of: Mapping[str, int]) -> str:
    total = sum(waiting_of.values())
    if total < LONG_QUEUE or len(waiting_of) < 2:
        return ""
    name, most = max(waiting_of.items(), key=lambda item: item[1])
    if most <= MOST_OF_QUEUE * total:
        return ""
    return f"The key {name!r} fills the queue: {most} of {total} waiting sequences are its own."
