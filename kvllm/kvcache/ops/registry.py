"""Which operations serve a cache."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvllm._extension import has_cuda_operators
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations

VECTOR_BYTES = 16
"""The CUDA operators move so many bytes at once: a key, or a block of codes, must have a multiple of them."""
FLOAT8_GPU = (8, 9)
"""The first compute capability that converts float8 as fp8_e4m3 has it."""


def make_operations(cache: PagedKVCache) -> KVOperations:
    """The fastest operations for the device of `cache`."""
    if cache.data.is_cpu and CpuOperations.serves(cache):
        return CpuOperations(cache)
    if cache.data.is_cuda and find_spec("triton") and why_not_triton(cache) is None:
        from kvllm.kvcache.ops.gpu import GpuOperations  # cannot be imported without triton

        shape = cache.shape
        vectors = 1 if shape.kv_format is None else shape.num_kv_heads * shape.block_size  # that are moved together
        fits = all(vectors * vector_bytes % VECTOR_BYTES == 0 for _, vector_bytes in shape.plane_groups)
        return GpuOperations(cache, compiled=fits and has_cuda_operators())
    return TorchOperations(cache)


def why_not_triton(cache: PagedKVCache) -> str | None:
    """The reason why Triton's kernels cannot store and read the format of a cache, None if they can."""
    kv_format = cache.shape.kv_format
    if kv_format is None or kv_format.name != "fp8_e4m3" or not cache.data.is_cuda:
        return None
    if torch.cuda.get_device_capability(cache.data.device) >= FLOAT8_GPU:
        return None
    return f"reads a KV cache of fp8_e4m3 on GPUs of compute capability {'.'.join(map(str, FLOAT8_GPU))} and newer"
