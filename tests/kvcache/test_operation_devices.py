"""The operations of a device move the bytes that plain torch moves on a CPU, in caches of any bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from kvllm._extension import has_cuda_operators
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers.caches import random_kept
from tests.helpers.devices import poisoned

NUM_BLOCKS = 13
OPERATIONS = ("cpu", "triton on cuda", "compiled on cuda")
EACH = pytest.mark.parametrize(
    "name", [name if name == "cpu" else pytest.param(name, marks=pytest.mark.gpu) for name in OPERATIONS]
)
# head_dim, block size, dtype, format of the cache.
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        *[
            CacheShape(2, 3, *sizes)
            for sizes in (
                (128, 256, torch.bfloat16),
                (128, 16, torch.float32),
                (64, 16, torch.float16),
                (96, 64, torch.bfloat16),
            )
        ],
        *[CacheShape(2, 3, 128, 16, torch.bfloat16, kv_format=kv_format) for kv_format in KV_FORMATS.values()],
        *[CacheShape(2, 3, 64, 32, torch.float32, kv_format=kv_format) for kv_format in KV_FORMATS.values()],
    ],
    ids=lambda shape: f"{shape.head_dim}-{shape.block_size}-{shape.kv_format.name if shape.kv_format else shape.dtype}",
)
Run = Callable[[KVOperations, torch.device], None]


def operations(name: str, cache: PagedKVCache) -> KVOperations:
    if name == "cpu":
        return CpuOperations(cache)
    if not find_spec("triton") or (name == "compiled on cuda" and not has_cuda_operators()):
        pytest.skip(f"{name}: not installed")
    from kvllm.kvcache.ops.gpu import GpuOperations

    return GpuOperations(cache, compiled=name == "compiled on cuda")


def bytes_of(cache: PagedKVCache) -> torch.Tensor:
    return cache.data.view(torch.uint8)


def assert_same_bytes(name: str, shape: CacheShape, run: Run) -> None:
    found = PagedKVCache(shape, NUM_BLOCKS, torch.device("cuda" if name.endswith("cuda") else "cpu"))
    expected = PagedKVCache(shape, NUM_BLOCKS)
    bytes_of(expected).random_(generator=torch.Generator().manual_seed(0))
    bytes_of(found).copy_(bytes_of(expected))
    with poisoned():
        run(operations(name, found), found.data.device)
    run(TorchOperations(expected), expected.data.device)
    assert torch.equal(bytes_of(found).cpu(), bytes_of(expected))


@EACH
@SHAPES
def test_store(name: str, shape: CacheShape) -> None:
    """Vectors of every size, from views of a wider tensor; codes and scales too."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(24, 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    vectors *= torch.logspace(-3, 3, 24)[:, None, None]
    vectors[1], vectors[2] = 0, -2.5
    slots = torch.randperm(NUM_BLOCKS * shape.block_size, generator=generator)[:24]
    slots[7] = -1

    def run(operations: KVOperations, device: torch.device) -> None:
        keys, values = vectors.to(device, shape.dtype).chunk(2, dim=1)
        operations.store(1, keys, values, slots.to(device))

    assert_same_bytes(name, shape, run)


@EACH
@SHAPES
def test_copy_blocks(name: str, shape: CacheShape) -> None:
    def run(operations: KVOperations, device: torch.device) -> None:
        operations.copy_blocks(torch.tensor([2, 2, 8], device=device), torch.tensor([5, 0, 12], device=device))

    assert_same_bytes(name, shape, run)


@EACH
@SHAPES
@pytest.mark.parametrize("ragged", [False, True])
def test_compact(name: str, shape: CacheShape, ragged: bool) -> None:
    """In place, to other blocks, and two sequences that share theirs: one moves out, then one compacts in place."""
    size = shape.block_size
    kept = random_kept(2, [3 * size, 2 * size], 3, [2 * size - 1, size], ragged=ragged)
    regions = torch.tensor([[11, 3, 7], [0, 6, 99]])  # the second has two blocks
    shared = torch.tensor([[0, 1, 2], [0, 1, 2]])

    def run(sources: torch.Tensor, targets: torch.Tensor, operations: KVOperations, device: torch.device) -> None:
        operations.compact(*(ids.contiguous().to(device) for ids in (kept, sources, targets)))

    for sources, targets in (
        (regions, regions[:, :2]),
        (regions, torch.tensor([[5, 2], [9, -1]])),
        (shared, torch.tensor([[5, 4], [0, 1]])),
    ):
        assert_same_bytes(name, shape, partial(run, sources, targets))
