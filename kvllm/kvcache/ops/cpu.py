"""The compiled CPU operators (csrc/cpu)."""

from __future__ import annotations

import torch

from kvllm._extension import operator
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.base import KVOperations


class CpuOperations(KVOperations):
    """Any dtype: KV pairs are copied as bytes. Block ids and slots outside of the cache raise RuntimeError."""

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        self._store = operator("store_kv")
        self._copy_blocks = operator("copy_blocks")
        self._compact = operator("compact")

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self._store(self.keys[layer], self.values[layer], keys, values, slot_mapping)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._copy_blocks(self.cache.data, sources, destinations)

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._compact(self.cache.data, kept, sources, destinations)
