"""Implementations of the operations that move KV pairs in a cache on the target: all that there are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from benchmarks.device.target import Target
from kvllm._extension import has_cuda_operators
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations

MakeOperations = Callable[[PagedKVCache], KVOperations]


def movers(target: Target) -> dict[str, MakeOperations]:
    """All that there are on the target, by name."""
    found: dict[str, MakeOperations] = {"torch": TorchOperations}
    if find_spec("triton"):
        from kvllm.kvcache.ops.gpu import GpuOperations

        found["Triton kernels"] = lambda cache: GpuOperations(cache, compiled=False)
        if not target.dry_run and has_cuda_operators():
            found["CUDA operators"] = lambda cache: GpuOperations(cache, compiled=True)
    if target.dry_run:
        found["CPU operators"] = CpuOperations
    return found
