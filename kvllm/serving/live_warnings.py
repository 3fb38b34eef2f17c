"""Plain warnings about what an operator should change, found in the samples of the last minute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvllm.serving.live import Sample

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
