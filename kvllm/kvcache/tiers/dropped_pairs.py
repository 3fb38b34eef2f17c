"""The KV pairs that compressions drop, in the host's memory, in chunks.

Which pairs a chunk holds differs from head to head, how many does not (`kvllm.kvcache.tiers.chunks`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KVFormat
from kvllm.kvcache.ops.registry import make_operations
from kvllm.kvcache.tiers.chunks import CHUNK, ERROR_BYTES, POSITION_BYTES, ChunkPool

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Chunks (or blocks), KV heads and offsets in them: int64 that broadcast to `[...]`."""


class DroppedPairs:
    """Chunks of KV pairs, addressed by chunk id.

    chunks: whose they are.
    cache: keys and values, with chunks for blocks, in the format of the pool or in one of fewer bits.
    positions: int32 `[layers, chunks, kv_heads, CHUNK]`, in the text.
    errors: float32, as many: the length of what storing took from each key. None where it takes nothing.
    operations: of the cache.
    """

    def __init__(self, shape: CacheShape, kv_format: KVFormat | None, num_chunks: int) -> None:
        self.chunks = ChunkPool(num_chunks)
        self.cache = PagedKVCache(_shape(shape, kv_format), num_chunks)
        size = (shape.num_layers, num_chunks, shape.num_kv_heads, CHUNK)
        self.positions = torch.empty(size, dtype=torch.int32)
        self.errors = torch.zeros(size) if kv_format else None
        self.operations = make_operations(self.cache)

    @staticmethod
    def chunk_bytes(shape: CacheShape, kv_format: KVFormat | None) -> int:
        """Bytes of a chunk: keys, values, positions, errors."""
        pairs = shape.num_layers * shape.num_kv_heads * CHUNK
        return _shape(shape, kv_format).bytes_per_block + pairs * (POSITION_BYTES + ERROR_BYTES)

    def store(self, layer: int, places: Places, pairs: torch.Tensor, positions: torch.Tensor) -> None:
        """Write pairs, float32 `[2, ..., head_dim]` (keys and values), with their positions `[...]`."""
        write_pairs(self.cache, layer, places, pairs)
        self.positions[layer][places] = positions
        if self.errors is not None:
            stored = read_pairs(self.cache, layer, places)[0]
            self.errors[layer][places] = (stored - pairs[0]).norm(dim=-1)


def read_pairs(cache: PagedKVCache, layer: int, places: Places) -> torch.Tensor:
    """Keys and values at some places: float32 `[2, ..., head_dim]`, a copy."""
    block, head, offset = places
    return torch.stack(
        [
            plane.decode([part[layer][block, head, offset] for part in plane.parts], torch.float32)
            for plane in cache.planes
        ]
    )


def write_pairs(cache: PagedKVCache, layer: int, places: Places, pairs: torch.Tensor) -> None:
    """Write what `read_pairs` returns. What was read from a cache of the same format is written bit for bit, unless
    that is quantized: then rounding may be done again."""
    block, head, offset = places
    for plane, vectors in zip(cache.planes, pairs, strict=True):
        for part, rows in zip(plane.parts, plane.encode(vectors), strict=True):
            part[layer][block, head, offset] = rows.to(part.dtype)


def _shape(shape: CacheShape, kv_format: KVFormat | None) -> CacheShape:
    return replace(shape, block_size=CHUNK, scored=False, kv_format=kv_format)
