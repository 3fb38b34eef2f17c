"""The compiled CPU operators (csrc/cpu) as an attention backend."""

from __future__ import annotations

import torch

from kvllm._extension import operator
from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.kvcache.cache import PagedKVCache


class CpuBackend(AttentionBackend):
    """Reads keys and values in place, any block size; sums are in float32. See `backends.why_not_cpu`."""

    name = "cpu"
    capturable = True

    def __init__(self, cache: PagedKVCache, num_query_heads: int, scale: float) -> None:
        super().__init__(cache, num_query_heads, scale)
        self._keys = [cache.keys(layer) for layer in range(cache.shape.num_layers)]
        self._values = [cache.values(layer) for layer in range(cache.shape.num_layers)]
        self._attention = operator("paged_attention")
        self._store = operator("store_kv")
        self._copy_blocks = operator("copy_blocks")
        self._compact = operator("compact")

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(self, layer: int, queries: torch.Tensor, plan: AttentionBatch) -> torch.Tensor:
        return self._attention(
            queries,
            self._keys[layer],
            self._values[layer],
            plan.query_start_loc,
            plan.last_kv_index,
            plan.block_tables,
            plan.packed_len,
            None if plan.head_lengths is None else plan.head_lengths[layer],
            self.scale,
        )

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self._store(self._keys[layer], self._values[layer], keys, values, slots)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._copy_blocks(self.cache.data, sources, destinations)

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._compact(self.cache.data, kept, sources, destinations)
