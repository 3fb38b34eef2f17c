"""Attention of the CPU operators while decoding, layer after layer.

The caches of all layers together exceed the processor's, and their blocks are scattered.
"""

from __future__ import annotations

import time

import msgspec
import torch

from benchmarks.common.limits import CPULimits
from benchmarks.common.shapes import SHAPES
from kvllm.attention.cpu import window_arguments
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16, "int4": torch.bfloat16}
"""That of queries, by the dtype of the cache."""
CACHE_BYTES = 256 << 20
CALLS = 30
"""Layers that one measurement goes through; the fastest counts, because others disturb most calls of a busy machine."""
HEADER = ["", "sequences", "context"]
FIGURES = ["us", "GB/s", "of memory"]


class AttentionCase(msgspec.Struct, frozen=True, tag=True):
    shape: str
    dtype: str
    block_size: int
    batch: int
    context: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head_dim."""
        shape = SHAPES[self.shape]
        return shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]

    @property
    def bytes(self) -> int:
        """Keys and values that one call reads."""
        return self.batch * self.context * self.cache_shape(1).bytes_per_block // self.block_size

    def cache_shape(self, layers: int) -> CacheShape:
        _, kv_heads, head_dim = self.heads
        kv_format = KV_FORMATS.get(self.dtype)
        return CacheShape(layers, kv_heads, head_dim, self.block_size, DTYPES[self.dtype], kv_format=kv_format)

    def labels(self) -> list[str]:
        return [f"{self.shape} {self.dtype}, blocks of {self.block_size}", str(self.batch), str(self.context)]

    def figures(self, seconds: float, limits: CPULimits) -> list[str]:
        rate = self.bytes / seconds
        return [f"{seconds * 1e6:.0f}", f"{rate / 1e9:.1f}", f"{rate / limits.read_bytes_per_s:.0%}"]


NO_WINDOWS = window_arguments(None)


class Decode:
    """One decode step of a case, layer after layer."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        query_heads, _, head_dim = case.heads
        dtype = DTYPES[case.dtype]
        width = -(-case.context // case.block_size)
        blocks = case.batch * width
        self.layers = max(2, CACHE_BYTES // (blocks * case.cache_shape(1).bytes_per_block))
        self.cache = PagedKVCache(case.cache_shape(self.layers), blocks)
        self._fill()
        generator = torch.Generator().manual_seed(0)
        self.queries = torch.rand(case.batch, query_heads, head_dim, generator=generator).to(dtype)
        self.query_start_loc = torch.arange(case.batch + 1, dtype=torch.int32)
        self.last_kv_index = torch.full((case.batch,), case.context - 1, dtype=torch.int32)
        self.block_tables = torch.randperm(blocks, generator=generator).to(torch.int32).view(case.batch, width)
        self.scale = head_dim**-0.5
        self.attention = torch.ops.kvllm.paged_attention.default
        self.next_layer = 0

    def _fill(self) -> None:
        """Numbers between -1 and 1, in every format."""
        vectors = torch.rand(self.cache.num_blocks, 1, 1, self.case.heads[2]) * 2 - 1
        for plane in self.cache.planes:
            for part, rows in zip(plane.parts, plane.encode(vectors), strict=True):
                part.copy_(rows)

    def seconds(self) -> float:
        """Seconds of one layer."""
        return min(self._call() for _ in range(CALLS))

    def _call(self) -> float:
        layer, self.next_layer = self.next_layer, (self.next_layer + 1) % self.layers
        keys, values = self.cache.keys(layer), self.cache.values(layer)
        tables = self.query_start_loc, self.last_kv_index, self.block_tables
        begin = time.perf_counter()
        self.attention(self.queries, keys, values, *tables, *[None] * 4, *NO_WINDOWS, self.scale)
        return time.perf_counter() - begin
