"""Sizes of an engine's pools: blocks of KV pairs, blocks and chunks in host memory, states of recurrent layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from kvllm.config import EngineConfig, host_room, require
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.tiers.dropped_pairs import DroppedPairs
from kvllm.stats import MemoryField
from kvllm.worker import host_memory
from kvllm.worker.features import bytes_beside_pool

logger = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30


class PoolOptions(NamedTuple):
    """Options that size the pools; see EngineArgs.

    pool_blocks: as `num_gpu_blocks_override`, in blocks of the size that they have here.
    num_ranks: those of an engine, which share `host_size`.
    """

    num_gpu_blocks_override: int | None
    pool_blocks: int | None
    kv_cache_memory_bytes: int | None
    host_size: float | None
    num_ranks: int


class PoolSizes(NamedTuple):
    """
    config: with the sizes; where `measured`, `num_blocks` is the most that is of use.
    beside: bytes of a rank's memory beside the pool, by the field of EngineStats that counts them.
    measured: whether the ranks find out how many blocks fit, once the model is loaded.
    """

    config: EngineConfig
    beside: Mapping[MemoryField, int]
    measured: bool


def pool_sizes(
    options: PoolOptions, config: EngineConfig, shape: CacheShape, block_bytes: int, device: str, free: int
) -> PoolSizes:
    """Share out the memory of a rank.

    block_bytes: of a block in all pools of a rank. free: bytes on its device.

    Raises ConfigError if what was asked for does not fit.
    """
    config = _with_room_for_states(options.kv_cache_memory_bytes, config, shape, free)
    beside = bytes_beside_pool(config, shape)
    measured = device == "cuda" and options.pool_blocks is None and options.kv_cache_memory_bytes is None
    num_blocks = config.num_blocks
    if not measured:
        num_blocks = _num_blocks(options, config, block_bytes, sum(beside.values()), free)
    num_host_blocks, num_host_chunks = _host_room(options, config, shape)
    config = structs.replace(
        config, num_blocks=num_blocks, num_host_blocks=num_host_blocks, num_host_chunks=num_host_chunks
    )
    return PoolSizes(config, beside, measured)


def _with_room_for_states(asked: int | None, config: EngineConfig, shape: CacheShape, free: int) -> EngineConfig:
    """Where layers hold a state for each sequence, so many sequences at once, and copies of states for prefixes, that
    these take half of the memory that the pool would have alone."""
    if shape.recurrent is None:
        return config
    size, memory = shape.recurrent.bytes_per_sequence, asked or min(4 * GIB, free // 2)
    least = f"at least {4 * size}: a sequence holds {size} bytes in recurrent layers, beside its KV pairs"
    require(memory >= 4 * size, "kv_cache_memory_bytes", memory, least)
    rows = memory // 2 // size - 1
    most = min(config.max_num_seqs, rows - rows // 4)
    snapshots = min(rows - most, 2 * most) if config.enable_prefix_caching else 0
    if most < config.max_num_seqs:
        _log_fewer_sequences(config, most, size)
    return structs.replace(config, max_num_seqs=most, num_state_snapshots=snapshots)


def _log_fewer_sequences(config: EngineConfig, most: int, size: int) -> None:
    logger.info(
        "at most %d sequences run at once instead of max_num_seqs=%d: each holds %.1f MiB in recurrent layers, which "
        "take half of the memory of KV pairs. kv_cache_memory_bytes gives more",
        most,
        config.max_num_seqs,
        size / MIB,
    )


def _num_blocks(options: PoolOptions, config: EngineConfig, block_bytes: int, state_bytes: int, free: int) -> int:
    """Blocks in the pool: as many as were asked for, or as go into half of the memory that is free.

    state_bytes: memory beside the pool, for the compression method and for recent KV pairs; it counts as memory of the
        pool.
    """
    blocks, memory = options.pool_blocks, options.kv_cache_memory_bytes
    if blocks is not None:
        field, value = "num_gpu_blocks_override", options.num_gpu_blocks_override
    elif memory is not None:
        field, value, blocks = "kv_cache_memory_bytes", memory, (memory - state_bytes) // block_bytes
        least = f"at least one block of {config.block_size} tokens, {block_bytes} bytes"
        if state_bytes:
            least += f", beside {state_bytes} bytes for the method and kv_residual_tokens: lower max_num_seqs or "
            least += "max_model_len to shrink these"
        require(blocks >= 1, field, value, least)
    else:
        return max(1, min(config.num_blocks, (min(4 * GIB, free // 2) - state_bytes) // block_bytes))
    needed = blocks * block_bytes + state_bytes
    require(
        needed <= free, field, value, f"it takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB of memory are free"
    )
    return blocks


def host_block_bytes(config: EngineConfig, shape: CacheShape) -> int:
    """Bytes that a block of a rank's pool takes on the host."""
    return replace(shape, kv_format=KV_FORMATS.get(config.kv_offload_dtype, shape.kv_format)).bytes_per_block


def host_chunk_bytes(config: EngineConfig, shape: CacheShape) -> int:
    """Bytes that a chunk of what compressions drop takes there; 0 if it is lost."""
    compression = config.active_compression
    if compression is None or not compression.recalls:
        return 0
    return DroppedPairs.chunk_bytes(shape, KV_FORMATS.get(compression.recall_dtype, shape.kv_format))


def _host_room(options: PoolOptions, config: EngineConfig, shape: CacheShape) -> tuple[int, int]:
    """Blocks of each rank in host memory, and chunks there for what compressions drop, if it may come back. All ranks
    of an engine together take `kv_offloading_size`."""
    size, num_ranks = options.host_size, options.num_ranks
    if size is None:
        return 0, 0
    block_bytes, chunk_bytes = host_block_bytes(config, shape) * num_ranks, host_chunk_bytes(config, shape) * num_ranks
    room = host_room(size, config.block_size, block_bytes, chunk_bytes or None)
    on_disk = config.kv_offloading_disk_size
    least = f"at least a block of {config.block_size} tokens, {block_bytes / GIB:.2g} GiB"
    has_room = config.kv_offloading_path is None or on_disk * GIB >= block_bytes
    require(has_room, "kv_offloading_disk_size", on_disk, least)
    free = host_memory.available_memory() / GIB
    allowed = f"{free:.1f} GiB of this machine's memory are free"
    require(size <= free, "kv_offloading_size", size, allowed)
    return room
