"""What fits into the host memory that an engine may take."""

from __future__ import annotations

from kvllm.config.checks import require
from kvllm.config.engine import EngineConfig

GIB = 1 << 30


def check_host_size(config: EngineConfig, size: float | None) -> None:
    """Raises ConfigError unless there is host memory (`kv_offloading_size`) where dropped KV pairs may come back."""
    allowed = "a number of GiB: with recall_period or recall_bound, what is dropped goes to host memory"
    require(size is not None or not config.recalls, "kv_offloading_size", size, allowed)


def host_room(size: float, block_size: int, block_bytes: int, chunk_bytes: int | None) -> tuple[int, int]:
    """Blocks of the KV pool, and chunks of dropped KV pairs.

    size: `kv_offloading_size`, in GiB. If dropped pairs may come back, half of it is for these.
    block_bytes, chunk_bytes: of a block of `block_size` tokens and of a chunk, on all ranks together; None where what
        is dropped is lost.

    Raises ConfigError if there is no room for one of them.
    """
    for_blocks = size / 2 if chunk_bytes else size
    blocks = int(for_blocks * GIB) // block_bytes
    least = f"at least a block of {block_size} tokens, {block_bytes / GIB:.2g} GiB"
    require(blocks >= 1, "kv_offloading_size", size, least)
    if chunk_bytes is None:
        return blocks, 0
    chunks = int((size - for_blocks) * GIB) // chunk_bytes
    least = f"at least two chunks of KV pairs, {2 * chunk_bytes / GIB:.2g} GiB"
    require(chunks >= 1, "kv_offloading_size", size, least)
    return blocks, chunks
