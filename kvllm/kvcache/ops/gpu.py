"""CUDA operators and Triton kernels. Needs the package triton."""

from __future__ import annotations

import torch

from kvllm._extension import operator
from kvllm.kernels.codes import as_kernels_read
from kvllm.kernels.compact import compact
from kvllm.kernels.copy_blocks import copy_blocks
from kvllm.kernels.store import store_kv
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.base import KVOperations


class GpuOperations(KVOperations):
    """Stores with a Triton kernel; copies and compacts with the compiled CUDA operators (csrc/cuda) or Triton kernels.
    A quantized cache is compacted by Triton: its codes, then their scales.

    Nothing waits for the device: a CUDA graph may hold `store`. Block ids and slots are on the device, and not checked.
    """

    reads_blocks = True

    def __init__(self, cache: PagedKVCache, compiled: bool) -> None:
        super().__init__(cache)
        quantized = cache.shape.kv_format is not None
        self.keys, self.values = as_kernels_read(self.keys), as_kernels_read(self.values)
        self._blocks = [whole_blocks(tensor) for tensor in cache.tensors] if quantized else cache.tensors
        self._copy_blocks = operator("copy_blocks") if compiled else copy_blocks
        self._compact = operator("compact") if compiled and not quantized else compact

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        store_kv(self.keys[layer], self.values[layer], keys, values, slot_mapping, rotated=self.cache.shape.rotated)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for blocks in self._blocks:
            self._copy_blocks(blocks, sources, destinations)

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for part in self.cache.parts:
            self._compact(part[: len(kept)], kept.contiguous(), sources.contiguous(), destinations.contiguous())


def whole_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a quantized cache as one vector for each block, int32 `[places, planes, blocks, 1, 1, words]`, a
    view."""
    return tensor.flatten(3).view(torch.int32)[..., None, None, :]
