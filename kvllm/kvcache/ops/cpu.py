"""The compiled CPU operators (csrc/cpu)."""

from __future__ import annotations

import torch

from kvllm._extension import operator
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.base import KVOperations

PRODUCTS = (torch.float32, torch.bfloat16)
"""Dtypes of queries that the operators multiply."""


def why_not_quantize(shape: CacheShape) -> str | None:
    """The reason why the operators cannot store and read a quantized cache, None if they can."""
    assert shape.kv_format is not None
    if shape.dtype not in PRODUCTS:
        return f"does not read a KV cache of {shape.kv_format.name} with activations of {shape.dtype}"
    if shape.head_dim % 32 or shape.head_dim > 256:
        return f"reads a KV cache of {shape.kv_format.name} with a head_dim of 32, 64, .. 256, not {shape.head_dim}"
    return None


class CpuOperations(KVOperations):
    """Any dtype and format. KV pairs are copied as bytes. Block ids and slots outside of the cache raise
    RuntimeError."""

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__(cache)
        self._store = operator("store_kv")
        self._copy_blocks = operator("copy_blocks")
        self._compact = operator("compact")
        self._gather_blocks = operator("gather_blocks")
        self._key_scores = operator("key_scores")

    @staticmethod
    def serves(cache: PagedKVCache) -> bool:
        """Whether the operators quantize what they store, where the cache is quantized."""
        return cache.shape.kv_format is None or why_not_quantize(cache.shape) is None

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self._store(self.keys[layer], self.values[layer], keys, values, slot_mapping)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for tensor in self.cache.tensors:
            self._copy_blocks(tensor, sources, destinations)

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for tensor in self.cache.tensors:
            self._compact(tensor[: len(kept)], kept, sources, destinations)

    def _gather_slots(self, of_layers: torch.Tensor, block_tables: torch.Tensor, size: int) -> torch.Tensor:
        return self._gather_blocks(of_layers, block_tables, size)

    def key_scores(
        self, layer: int, queries: torch.Tensor, block_tables: torch.Tensor, last_kv_index: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Where the kernels have no product for the dtype of queries, in plain torch."""
        if queries.dtype not in PRODUCTS:
            return super().key_scores(layer, queries, block_tables, last_kv_index, scale)
        return self._key_scores(queries.contiguous(), self.keys[layer], block_tables, last_kv_index, scale)
