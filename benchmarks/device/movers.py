"""What moves entries in a cache: an attention backend, or the Triton kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch

from benchmarks.device.target import Target
from kvllm._extension import has_cuda_operators
from kvllm.attention.registry import make_backend
from kvllm.kvcache.cache import PagedKVCache


class Mover(Protocol):
    """Over one cache, as AttentionBackend."""

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None: ...

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None: ...


MakeMover = Callable[[PagedKVCache], Mover]


def mover_of_backend(name: str, cache: PagedKVCache) -> Mover:
    return make_backend(name, cache, cache.shape.num_kv_heads, 1.0)


class TritonMover:
    """What backends use on a GPU where the CUDA operators were not built."""

    def __init__(self, cache: PagedKVCache) -> None:
        from kvllm.kernels.compact import compact
        from kvllm.kernels.copy_blocks import copy_blocks

        self.copy_blocks = partial(copy_blocks, cache.data)
        self.compact = partial(compact, cache.data)


def movers(target: Target) -> dict[str, MakeMover]:
    """All that there are on the target, by name."""
    found: dict[str, MakeMover] = {}
    if find_spec("triton"):
        found["Triton kernels"] = TritonMover
    if target.dry_run:
        found["CPU operators"] = partial(mover_of_backend, "cpu")
    elif has_cuda_operators():
        found["CUDA operators"] = partial(mover_of_backend, "auto")
    return found
