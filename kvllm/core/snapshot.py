"""What an engine holds at one moment, read between two of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from kvllm.core.request import Request
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.stats import EngineStats

MOST_ROWS = 100


class PoolUse(Struct):
    """Blocks of the KV pool. They add up to `total`.

    sliding: owned by running sequences, for layers that attend only a window.
    prompt, compressed, tail: owned for the other layers, for prompts, for what compressions left of output, and for
        output that none has covered. A block with KV pairs of several kinds counts where most of these are.
    reusable: owned by none, with a prefix that a later request may share.
    without_compression: blocks that the same sequences would own if nothing had been dropped.
    """

    total: int
    prompt: int = 0
    compressed: int = 0
    tail: int = 0
    reusable: int = 0
    free: int = 0
    without_compression: int = 0
    sliding: int = 0


class SequenceRow(Struct):
    """One unfinished sequence.

    id, index: the request, and which of its completions this is.
    state: "running", "prefill" or "waiting".
    age: seconds since the request came.
    tokens, kept: tokens computed, and KV pairs of these in the cache.
    windows: windows compressed, of what is in the cache now.
    """

    id: str
    index: int
    tenant: str
    state: str
    age: float
    prompt_tokens: int
    output_tokens: int
    blocks: int
    tokens: int
    kept: int
    windows: int
    preemptions: int
    cached_tokens: int


class EngineSnapshot(Struct):
    """The state of an engine.

    rows: of the sequences that hold most blocks, then of waiting ones; MOST_ROWS at most.
    waiting_for: why the first waiting sequence waits; "" if none does.
    waiting_of: how many wait, by tenant.
    """

    pool: PoolUse
    stats: EngineStats
    running: int
    waiting: int
    waiting_for: str
    waiting_of: dict[str, int]
    rows: list[SequenceRow]


def take_snapshot(
    scheduler: Scheduler, requests: Mapping[str, Request], stats: EngineStats, now: float
) -> EngineSnapshot:
    """The state of an engine at time.monotonic() = `now`, for its own thread to take. requests: by their ids."""
    running, waiting = scheduler.running, list(scheduler.waiting.values())
    largest = sorted(running, key=lambda seq: -seq.num_blocks)[:MOST_ROWS]
    rows = [make_row(seq, requests[seq.request_id], now) for seq in largest]
    rows += [make_row(seq, requests[seq.request_id], now, "waiting") for seq in waiting[: MOST_ROWS - len(rows)]]
    return EngineSnapshot(
        _pool(scheduler),
        counters(stats),
        len(running),
        len(waiting),
        _waiting_for(scheduler) if waiting else "",
        dict(Counter(seq.tenant for seq in waiting)),
        rows,
    )


def counters(stats: EngineStats) -> EngineStats:
    """A copy without the timeline."""
    found = EngineStats(stats.num_blocks)
    for name in stats.__struct_fields__:
        if name != "packed_timeline":
            setattr(found, name, stats[name])
    return found


def _pool(scheduler: Scheduler) -> PoolUse:
    blocks = scheduler.blocks
    pool = PoolUse(blocks.num_blocks, reusable=blocks.num_idle, free=blocks.num_available - blocks.num_idle)
    named = dropped = 0
    for seq in scheduler.running:
        for table in seq.tables:
            num_blocks = len(table.blocks)
            if not table.is_full:
                pool.sliding += num_blocks
                continue
            tail, compressed = _blocks_behind_prompt(seq, num_blocks, blocks.block_size)
            pool.tail += tail
            pool.compressed += compressed
            named += num_blocks
            dropped += blocks.blocks_for(seq.logical_length) - blocks.blocks_for(seq.logical_length - table.dropped)
    # Blocks that several tables name are taken from the prompts first, which is what sequences share.
    pool.prompt = named - pool.tail - pool.compressed
    shared = named + pool.sliding - blocks.num_owned
    for kind in ("prompt", "sliding", "tail", "compressed"):
        surplus = min(shared, getattr(pool, kind))
        setattr(pool, kind, getattr(pool, kind) - surplus)
        shared -= surplus
    pool.without_compression = blocks.num_owned + dropped
    return pool


def _blocks_behind_prompt(seq: Sequence, num_blocks: int, block_size: int) -> tuple[int, int]:
    """Of the blocks of a table, those of output that no compression has covered, and of what compressions have left."""
    generated = max(0, seq.logical_length - seq.prompt_length)
    tail = min(num_blocks, round(min(seq.uncompressed_tail, generated) / block_size))
    if not seq.compressions:
        return tail, 0
    protected = min(seq.cached_length, seq.compressions[0].start)
    return tail, max(0, num_blocks - tail - -(-protected // block_size))


def _waiting_for(scheduler: Scheduler) -> str:
    most, missing = scheduler.config.max_num_seqs, scheduler.step.missing_blocks
    if len(scheduler.running) >= most:
        return f"a place: {most} sequences run, which is the most"
    if missing:
        return f"blocks: {missing} are missing in the pool"
    if scheduler.step.blocked:
        return "a compression that itself waits for blocks"
    return "the next step"


def make_row(seq: Sequence, request: Request, now: float, state: str = "") -> SequenceRow:
    """state: that of a sequence that does not run."""
    state = state or ("prefill" if seq.is_prefilling else "running")
    return SequenceRow(
        seq.request_id,
        seq.index,
        seq.tenant,
        state,
        round(now - request.output.metrics.arrival_time, 1),
        seq.prompt_length,
        seq.num_generated,
        seq.num_blocks,
        seq.logical_length,
        seq.cached_length,
        sum(region.count for region in seq.compressions),
        seq.preemptions,
        seq.cache_hits,
    )
