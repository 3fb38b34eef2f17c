"""What an engine holds at one moment, read between two of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec import Struct

from kvllm.core.engine import LLMEngine
from kvllm.core.request import Request
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.stats import EngineStats

if TYPE_CHECKING:
    from kvllm.distributed.replicas.engine import DataParallelEngine
    from kvllm.engine_builder import Engine

MOST_ROWS = 100


class PoolUse(Struct):
    """Blocks of the KV pool. They add up to `total`.

    prompt, compressed, tail: owned by running sequences, for prompts, for what compressions left of output, and for
        output that none has covered. A block with KV pairs of several kinds counts where most of these are.
    other: owned, in replicas, which do not report the kinds.
    reusable: owned by none, with a prefix that a later request may share.
    without_compression: blocks that the same sequences would own if nothing had been dropped.
    """

    total: int
    prompt: int = 0
    compressed: int = 0
    tail: int = 0
    other: int = 0
    reusable: int = 0
    free: int = 0
    without_compression: int = 0


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


def take_snapshot(engine: Engine, now: float) -> EngineSnapshot:
    """The state of an engine at time.monotonic() = `now`, for its own thread to take."""
    if isinstance(engine, LLMEngine):
        scheduler = engine.scheduler
        pool, running = _pool(scheduler), scheduler.running
        waiting, waiting_for = list(scheduler.waiting.values()), _waiting_for(scheduler)
    else:
        pool, running = _pool_of_replicas(engine), engine.dispatcher.placed
        waiting, waiting_for = list(engine.dispatcher.waiting.values()), "a replica with room for it"
    requests = engine.outputs.requests
    largest = sorted(running, key=lambda seq: -len(seq.block_table))[:MOST_ROWS]
    rows = [_row(seq, requests[seq.request_id], now) for seq in largest]
    rows += [_row(seq, requests[seq.request_id], now, "waiting") for seq in waiting[: MOST_ROWS - len(rows)]]
    return EngineSnapshot(
        pool,
        _counters(engine.stats),
        len(running),
        len(waiting),
        waiting_for if waiting else "",
        dict(Counter(seq.tenant for seq in waiting)),
        rows,
    )


def _counters(stats: EngineStats) -> EngineStats:
    counters = EngineStats(stats.num_blocks)
    for name in stats.__struct_fields__:
        if name != "packed_timeline":
            setattr(counters, name, stats[name])
    return counters


def _pool(scheduler: Scheduler) -> PoolUse:
    blocks = scheduler.blocks
    pool = PoolUse(blocks.num_blocks, reusable=blocks.num_idle, free=blocks.num_available - blocks.num_idle)
    named = dropped = 0
    for seq in scheduler.running:
        tail, compressed = _blocks_behind_prompt(seq, blocks.block_size)
        pool.tail += tail
        pool.compressed += compressed
        named += len(seq.block_table)
        dropped += blocks.blocks_for(seq.logical_length) - blocks.blocks_for(seq.cached_length)
    # Blocks that several tables name are taken from the prompts first, which is what sequences share.
    pool.prompt = named - pool.tail - pool.compressed
    shared = named - blocks.num_owned
    for kind in ("prompt", "tail", "compressed"):
        surplus = min(shared, getattr(pool, kind))
        setattr(pool, kind, getattr(pool, kind) - surplus)
        shared -= surplus
    pool.without_compression = blocks.num_owned + dropped
    return pool


def _blocks_behind_prompt(seq: Sequence, block_size: int) -> tuple[int, int]:
    """Blocks of the output that no compression has covered, and of what compressions have left."""
    table = len(seq.block_table)
    generated = max(0, seq.logical_length - seq.prompt_length)
    tail = min(table, round(min(seq.uncompressed_tail, generated) / block_size))
    if not seq.compressions:
        return tail, 0
    protected = min(seq.cached_length, seq.compressions[0].start)
    return tail, max(0, table - tail - -(-protected // block_size))


def _pool_of_replicas(engine: DataParallelEngine) -> PoolUse:
    stats = engine.stats
    in_use = 0
    if engine.has_unfinished_requests():
        in_use = next((blocks for _, blocks in stats.timeline_since(stats.steps - 1)), 0)
    return PoolUse(stats.num_blocks, other=in_use, free=stats.num_blocks - in_use, without_compression=in_use)


def _waiting_for(scheduler: Scheduler) -> str:
    most, missing = scheduler.config.max_num_seqs, scheduler.missing_blocks
    if len(scheduler.running) >= most:
        return f"a place: {most} sequences run, which is the most"
    if missing:
        return f"blocks: {missing} are missing in the pool"
    if scheduler.planner and scheduler.planner.blocked:
        return "a compression that itself waits for blocks"
    return "the next step"


def _row(seq: Sequence, request: Request, now: float, state: str = "") -> SequenceRow:
    if not state:
        # In replicas, whose sequences own no blocks here, the first token tells that the prompt is computed.
        is_prefilling = seq.is_prefilling if seq.block_table else not seq.num_generated
        state = "prefill" if is_prefilling else "running"
    return SequenceRow(
        seq.request_id,
        seq.index,
        seq.tenant,
        state,
        round(now - request.output.metrics.arrival_time, 1),
        seq.prompt_length,
        seq.num_generated,
        len(seq.block_table),
        seq.logical_length,
        seq.cached_length,
        sum(region.count for region in seq.compressions),
        seq.preemptions,
        seq.cache_hits,
    )


def find_sequences(engine: Engine, request_id: str) -> Collection[Sequence]:
    """The unfinished sequences of a request, none if it is unknown."""
    request = engine.outputs.requests.get(request_id)
    return () if request is None else request.sequences.values()
