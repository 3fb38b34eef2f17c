"""The KV pairs that compressions drop, in the host's memory, in chunks.

A chunk has room for `CHUNK` pairs in every layer and KV head, and belongs to one sequence. All layers and heads of a
sequence drop equally many pairs, so its chunks are filled alike; which pairs they hold differs from head to head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KVFormat
from kvllm.kvcache.ops.registry import make_operations

CHUNK = 16

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Chunks (or blocks), KV heads and offsets in them: int64 that broadcast to `[...]`."""


class DroppedPairs:
    """Chunks of KV pairs, addressed by chunk id.

    cache: keys and values, with chunks for blocks, in the format of the pool or in one of fewer bits.
    positions: int32 `[layers, chunks, kv_heads, CHUNK]`, in the text.
    errors: float32, as many: the length of what storing took from each key. None where it takes nothing.
    operations: of the cache.
    """

    def __init__(self, shape: CacheShape, kv_format: KVFormat | None, num_chunks: int) -> None:
        self.cache = PagedKVCache(_shape(shape, kv_format), num_chunks)
        size = (shape.num_layers, num_chunks, shape.num_kv_heads, CHUNK)
        self.positions = torch.empty(size, dtype=torch.int32)
        self.errors = torch.zeros(size) if kv_format else None
        self.operations = make_operations(self.cache)
        self._free = list(reversed(range(num_chunks)))

    @staticmethod
    def chunk_bytes(shape: CacheShape, kv_format: KVFormat | None) -> int:
        """Bytes of a chunk: keys, values, positions, errors."""
        return _shape(shape, kv_format).bytes_per_block + 8 * shape.num_layers * shape.num_kv_heads * CHUNK

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Ids of so many chunks; `num_free` says how many there are."""
        return [self._free.pop() for _ in range(count)]

    def release(self, chunks: Sequence[int]) -> None:
        self._free.extend(chunks)

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
