"""The attention backends by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from kvllm.attention.backend import AttentionBackend
from kvllm.attention.cache import PagedKVCache
from kvllm.attention.cpu import CpuBackend
from kvllm.attention.reference import ReferenceBackend
from kvllm.errors import ConfigError


def why_not_triton(cache: PagedKVCache) -> str | None:
    """What keeps the Triton kernels from serving `cache`, or None if they can."""
    shape = cache.shape
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if not cache.data.is_cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":
            return f"runs on CUDA devices, not on {cache.data.device}"
        if shape.dtype == torch.bfloat16:
            return "cannot use bfloat16 in Triton's interpreter, whose bfloat16 arithmetic is wrong"
    if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in bfloat16, float16 or float32, not {shape.dtype}"
    if shape.block_size < 16 or shape.block_size & (shape.block_size - 1):
        return f"needs a block_size that is a power of two from 16 on, not {shape.block_size}"
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= 256:
        return f"needs a head_dim that is a multiple of 16 up to 256, not {shape.head_dim}"
    return None


def make_triton(cache: PagedKVCache, num_query_heads: int, scale: float) -> AttentionBackend:
    """TritonBackend, imported only when it is asked for.

    Raises ConfigError if it cannot serve the cache.
    """
    if reason := why_not_triton(cache):
        alternatives = "'cpu' or 'reference'" if cache.data.is_cpu else "'reference'"
        raise ConfigError(f"the attention backend 'triton' {reason}: use {alternatives}")
    from kvllm.attention.triton import TritonBackend

    return TritonBackend(cache, num_query_heads, scale)


BACKENDS: dict[str, Callable[[PagedKVCache, int, float], AttentionBackend]] = {
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
    "triton": make_triton,
}


def make_backend(name: str, cache: PagedKVCache, num_query_heads: int, scale: float) -> AttentionBackend:
    """The backend `name` over `cache`; "auto" takes the fastest one for the cache's device.

    Raises ConfigError for a name that is not in BACKENDS, and for a backend that cannot serve the cache.
    """
    if name == "auto":
        name = _fastest(cache)
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}: use 'auto' or one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](cache, num_query_heads, scale)


def _fastest(cache: PagedKVCache) -> str:
    if cache.data.is_cpu:
        return "cpu"
    return "reference" if why_not_triton(cache) else "triton"
