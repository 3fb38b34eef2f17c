"""Which operations serve a cache."""

from __future__ import annotations

from importlib.util import find_spec

from kvllm._extension import has_cuda_operators
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations

VECTOR_BYTES = 16
"""The CUDA operators move so many bytes at once: a key must have a multiple of them."""


def make_operations(cache: PagedKVCache) -> KVOperations:
    """The fastest operations for the device of `cache`."""
    if cache.data.is_cpu and CpuOperations.serves(cache):
        return CpuOperations(cache)
    if cache.shape.kv_format is None and cache.data.is_cuda and find_spec("triton"):
        from kvllm.kvcache.ops.gpu import GpuOperations  # cannot be imported without triton

        whole_vectors = cache.shape.head_dim * cache.shape.dtype.itemsize % VECTOR_BYTES == 0
        return GpuOperations(cache, compiled=whole_vectors and has_cuda_operators())
    return TorchOperations(cache)
