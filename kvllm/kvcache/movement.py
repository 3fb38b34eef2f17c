"""Data movement in a cache on a GPU, the same for all attention backends there."""

from __future__ import annotations

import torch

from kvllm._extension import has_cuda_operators, operator
from kvllm.attention.base import AttentionBackend
from kvllm.kernels.compact import compact
from kvllm.kernels.copy_blocks import copy_blocks
from kvllm.kernels.store import store_kv
from kvllm.kvcache.cache import PagedKVCache


class DeviceBackend(AttentionBackend):
    """Stores with a Triton kernel; copies and compacts with the CUDA operators (csrc/cuda) where they were built, with
    Triton kernels where not. Ids and slots are not checked: they live on the device."""

    def __init__(self, cache: PagedKVCache, num_query_heads: int, scale: float) -> None:
        super().__init__(cache, num_query_heads, scale)
        self.keys = [cache.keys(layer) for layer in range(cache.shape.num_layers)]
        self.values = [cache.values(layer) for layer in range(cache.shape.num_layers)]
        compiled = cache.data.is_cuda and has_cuda_operators()
        self._copy_blocks = operator("copy_blocks") if compiled else copy_blocks
        self._compact = operator("compact") if compiled else compact

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        store_kv(self.keys[layer], self.values[layer], keys, values, slots)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._copy_blocks(self.cache.data, sources, destinations)

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._compact(self.cache.data, kept.contiguous(), sources.contiguous(), destinations.contiguous())
