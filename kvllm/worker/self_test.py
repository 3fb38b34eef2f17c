"""A first look at whether the kernels that Triton compiles for the device at hand are right."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.reference import ReferenceBackend
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.models.config import EXPANDED
from kvllm.models.quantized_matrix import NUMBERS_OF_ROWS, QuantizedMatrix
from kvllm.worker.transfer import to_device

SWITCHES = {9: "DISABLE_MMA_V3", 10: "DISABLE_MMA_V5"}
"""By the compute capability: Triton's variable that has tensor cores read registers, and no shared memory, which takes
longer. Some versions have gone wrong there (triton issues 10486, 10573, 11366)."""
ALLOWED = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Most of ‖found - expected‖ / ‖expected‖."""
LENGTHS = 1100, 900
"""KV pairs of two sequences: more than are on their way to a multiprocessor at once."""
NUM_QUERIES = 1, 3
OUTPUTS = 128
"""Rows of a matrix of integers that are multiplied."""


def check_attention(backend: AttentionBackend) -> str | None:
    """Compare attention by Triton's kernels with plain torch, in a layer like the first of a backend.

    Returns a warning if they are right only with products that take longer, which are used from now on.
    Raises ConfigError if they are wrong.
    """
    if backend.name != "triton":
        return None
    from kvllm.kernels.capability import capability

    problem, switch = _problem(backend), SWITCHES.get(capability() // 10)
    if problem and switch and os.environ.get(switch) != "1":
        os.environ[switch] = "1"
        _forget_compiled()
        if not _problem(backend):
            return f"Triton's attention kernels are wrong on this device ({problem}): they run with {switch}=1, slower"
    if problem:
        raise ConfigError(
            f"Triton's attention kernels are wrong on this device ({problem}{f', {switch}=1' if switch else ''}): use "
            "another version of Triton, or another attention_backend"
        )
    return None


@torch.inference_mode()
def check_integers(matrices: Sequence[QuantizedMatrix], dtype: torch.dtype) -> None:
    """Compare products with integers, of rows of a dtype, with those of the numbers that they stand for.

    Raises ConfigError if they are wrong.
    """
    kinds = {(each.bits, each.group, each.shifts is None): each for each in matrices}
    for matrix in kinds.values():
        part = matrix.part(0, min(OUTPUTS, len(matrix.codes)))
        weight = part.rows(torch.arange(len(part.codes), device=part.codes.device)).to(dtype).double()
        for num_rows in NUMBERS_OF_ROWS:
            x = torch.randn(num_rows, part.in_features, generator=torch.Generator().manual_seed(0))
            x = x.to(part.codes.device, dtype)
            expected = x.double() @ weight.T
            error = float((part.multiply(x, None).double() - expected).norm() / expected.norm())
            if not error <= ALLOWED[dtype]:
                raise ConfigError(
                    f"Triton's products with integers are wrong on this device (relative error {error:.3g}): set "
                    f"quantization={EXPANDED!r}, which expands them, or use another version of Triton"
                )


def _problem(backend: AttentionBackend) -> str | None:
    dtype = backend.cache.shape.dtype
    try:
        error = _error(backend)
    except torch.AcceleratorError as failure:  # after which the process can use the device no more
        raise ConfigError(
            f"Triton's attention kernels fail on this device ({str(failure).splitlines()[0]}): set "
            f"{' or '.join(f'{name}=1' for name in SWITCHES.values())} in the environment, use another version of "
            "Triton, or another attention_backend"
        ) from failure
    return None if error <= ALLOWED[dtype] else f"relative error {error:.3g}"


def _error(backend: AttentionBackend) -> float:
    """Of a decode and a chunk."""
    device = backend.cache.data.device
    shape = replace(backend.cache.shape, num_layers=1, places=(), scored=False, recurrent=None)
    num_blocks = -(-max(LENGTHS) // shape.block_size)
    cache, generator = PagedKVCache(shape, 2 * num_blocks, device), torch.Generator().manual_seed(0)

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, shape.dtype)

    def ints(values: ArrayLike) -> torch.Tensor:
        return to_device(values, device, torch.int32)

    slots = torch.arange(2 * num_blocks * shape.block_size, device=device)
    keys, values = randn(2, len(slots), shape.num_kv_heads, shape.head_dim)
    make_operations(cache).store(0, keys, values, slots)
    last = [length - i for length, count in zip(LENGTHS, NUM_QUERIES, strict=True) for i in range(count, 0, -1)]
    tables = ints(np.arange(2 * num_blocks).reshape(2, -1))
    batch = AttentionBatch(ints([0, *np.cumsum(NUM_QUERIES)]), ints(last), tables)
    queries, options = randn(len(last), backend.num_query_heads, shape.head_dim), backend.layers[:1]
    sinks = randn(backend.num_query_heads).float() if options[0].sinks else None
    kinds: list[type[AttentionBackend]] = [type(backend), ReferenceBackend]
    backends = [kind(cache, backend.num_query_heads, backend.scale, options) for kind in kinds]
    found, expected = (each.run(0, queries, each.plan(batch), sinks).double() for each in backends)
    return float((found - expected).norm() / expected.norm())


def _forget_compiled() -> None:
    """Let Triton compile the kernels of attention again."""
    from kvllm.kernels import decode, prefill

    for module in (decode, prefill):
        for each in vars(module).values():
            if hasattr(each, "device_caches"):
                each.device_caches.clear()
