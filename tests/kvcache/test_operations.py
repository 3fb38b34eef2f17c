"""Stores, copies and compactions of KV pairs, bit for bit; and which operations serve a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops import registry
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.kvcache.ops.registry import make_operations
from tests.helpers.caches import literal_compaction, random_kept
from tests.helpers.tensors import randn

MakeOperations = Callable[[PagedKVCache], KVOperations]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
OPERATIONS = pytest.mark.parametrize("make", [CpuOperations, TorchOperations], ids=["cpu", "torch"])


def make_cache(
    num_layers: int = 2,
    num_kv_heads: int = 3,
    block_size: int = 4,
    num_blocks: int = 9,
    dtype: torch.dtype = torch.float32,
) -> PagedKVCache:
    cache = PagedKVCache(CacheShape(num_layers, num_kv_heads, 6, block_size, dtype), num_blocks)
    cache.data.copy_(torch.arange(cache.data.numel()).reshape(cache.data.shape) % 251)
    return cache


@OPERATIONS
@DTYPES
def test_store(make: MakeOperations, dtype: torch.dtype) -> None:
    cache = make_cache(dtype=dtype)
    expected = cache.data.clone()
    slots = torch.tensor([7, -1, 0, 35, 20])
    qkv = randn(5, 100, dtype=dtype)
    keys, values = qkv[:, 10:28].unflatten(1, (3, 6)), qkv[:, 40:58].unflatten(1, (3, 6))
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[1, 0, slot // 4, :, slot % 4] = keys[row]
            expected[1, 1, slot // 4, :, slot % 4] = values[row]
    make(cache).store(1, keys, values, slots)
    assert torch.equal(cache.data, expected)


@OPERATIONS
@pytest.mark.parametrize("name", [None, "int8"])
def test_values_that_are_keys(make: MakeOperations, name: str | None) -> None:
    """They are stored once, and moved as the keys of a cache with both."""
    shape = CacheShape(2, 3, 32, 4, torch.float32, kv_format=KV_FORMATS[name] if name else None)
    caches = [PagedKVCache(replace(shape, shared=shared), 9) for shared in (False, True)]
    vectors, slots = randn(36, 3, 32), torch.arange(36)
    kept = torch.tensor([1, 2, 6]).expand(2, 1, 3, 3).contiguous()
    for cache in caches:
        operations = make(cache)
        for layer in range(2):
            operations.store(layer, vectors + layer, vectors + layer, slots)
        operations.copy_blocks(torch.tensor([2]), torch.tensor([8]))
        operations.compact(kept, torch.tensor([[0, 1]]), torch.tensor([[0]]))
    both, one = caches
    assert 2 * one.data.nbytes == both.data.nbytes
    for layer in range(2):
        found = [each.view(torch.uint8) for each in (one.keys(layer), one.values(layer), both.values(layer))]
        assert found[0].data_ptr() == found[1].data_ptr() and torch.equal(found[0], found[2])
    tables = torch.tensor([[8, 0]], dtype=torch.int32)
    assert torch.equal(make(one).gather_values([0, 1], tables, 7), make(both).gather_values([0, 1], tables, 7))


@OPERATIONS
@DTYPES
def test_copy_blocks(make: MakeOperations, dtype: torch.dtype) -> None:
    cache = make_cache(dtype=dtype)
    expected = cache.data.clone()
    for source, destination in ((2, 5), (2, 0), (8, 1)):
        expected[:, :, destination] = cache.data[:, :, source]
    make(cache).copy_blocks(torch.tensor([2, 2, 8]), torch.tensor([5, 0, 1]))
    assert torch.equal(cache.data, expected)


@OPERATIONS
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_compact(make: MakeOperations, in_place: bool, ragged: bool) -> None:
    cache = make_cache(num_blocks=12)
    sources = torch.tensor([[11, 3, 7], [0, 6, 99]])  # the second region has two blocks
    destinations = sources[:, :2] if in_place else torch.tensor([[5, 2], [9, -1]])
    kept = random_kept(2, [12, 8], 3, [7, 4], ragged=ragged)
    expected = literal_compaction(cache.data, kept, sources, destinations)
    make(cache).compact(kept, sources, destinations.contiguous())
    assert torch.equal(cache.data, expected)


def test_compact_takes_sequences_in_order() -> None:
    """Two sequences share their blocks: one moves its survivors out, then the other compacts in place."""
    sources, destinations = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[5], [0]])
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for seed in range(20):
            caches = [PagedKVCache(CacheShape(3, 2, 32, 16, torch.float32), 12) for _ in range(2)]
            caches[0].data.copy_(randn(*caches[0].data.shape, seed=seed))
            caches[1].data.copy_(caches[0].data)
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.rand(3, 2, 2, 48, generator=generator).argsort(-1)[..., :16].sort(-1).values
            for make, cache in zip((CpuOperations, TorchOperations), caches, strict=True):
                make(cache).compact(chosen, sources, destinations)
            assert torch.equal(caches[0].data, caches[1].data)
    finally:
        torch.set_num_threads(threads)


@OPERATIONS
@pytest.mark.parametrize("fixture", ["paged_compaction", "paged_compaction_256"])
def test_compact_golden(make: MakeOperations, fixture: str, load_vectors: Callable) -> None:
    arrays, meta = load_vectors(fixture)
    for i, case in enumerate(meta["cases"]):
        block_size, start, window = case["B"], case["start"], case["window_blocks"]
        data = torch.stack([torch.from_numpy(arrays[f"c{i}_{kind}_cache"]) for kind in "kv"], dim=1).transpose(3, 4)
        shape = CacheShape(case["L"], case["Hkv"], case["d"], block_size, torch.float32)
        cache = PagedKVCache(shape, case["num_blocks"])
        cache.data.copy_(data)

        # The paper's mode: the tail after the window survives whole, so it is kept as well.
        table = torch.from_numpy(arrays[f"c{i}_block_table"])
        kept_window = torch.from_numpy(arrays[f"c{i}_kept"]).unsqueeze(1)
        tail = torch.arange(window * block_size, case["C"] - start).expand(*kept_window.shape[:3], -1)
        kept = torch.cat((kept_window, tail), dim=-1)
        sources = table[None, start // block_size :].contiguous()
        after = torch.from_numpy(arrays[f"c{i}_block_table_after"])
        destinations = after[None, start // block_size :].contiguous()
        make(cache).compact(kept, sources, destinations)

        entries = torch.arange(case["C_after"])
        for plane, kind in enumerate("kv"):
            logical = cache.data[:, plane, after[entries // block_size], :, entries % block_size]
            expected = torch.from_numpy(arrays[f"c{i}_{kind}_after_logical"])
            assert torch.equal(logical.permute(1, 2, 0, 3), expected)


def test_the_compiled_operators_refuse_bad_ids() -> None:
    cache = make_cache(num_layers=1, num_kv_heads=1)
    operations = CpuOperations(cache)
    before = cache.data.clone()
    rows = randn(1, 1, 6)
    sources, destinations = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])

    def compact(kept: list[int], sources: torch.Tensor = sources, destinations: torch.Tensor = destinations) -> None:
        operations.compact(torch.tensor(kept).view(1, 1, 1, -1), sources, destinations)

    calls: dict[str, Callable[[], object]] = {
        "slot 36 is not in the cache of 9 blocks of 4": lambda: operations.store(0, rows, rows, torch.tensor([36])),
        "dimension 1 of keys is 2, not 1": lambda: operations.store(0, randn(1, 2, 6), rows, torch.tensor([0])),
        "slots has dtype Int, not Long": lambda: operations.store(0, rows, rows, torch.tensor([0]).int()),
        "block 9 of sources": lambda: operations.copy_blocks(torch.tensor([9]), torch.tensor([0])),
        "block -1 of destinations": lambda: operations.copy_blocks(torch.tensor([0]), torch.tensor([-1])),
        "not strictly ascending: 3 follows 3": lambda: compact([0, 3, 3]),
        "not strictly ascending: 1 follows 2": lambda: compact([2, 1]),
        "-1 before 4": lambda: compact([2, -1, 4]),
        "reaches offset 8 of a region of 2 blocks of 4": lambda: compact([8]),
        "5 kept KV pairs do not fit 1 blocks of 4": lambda: compact([0, 1, 2, 3, 4], destinations=destinations[:, :1]),
        "block 12 of sources": lambda: compact([0, 4], sources=torch.tensor([[0, 12]])),
        "block -3 of destinations": lambda: compact([0], destinations=torch.tensor([[-3]])),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()
    assert torch.equal(cache.data, before)


def test_the_device_of_a_cache_chooses() -> None:
    shape = CacheShape(1, 1, 6, 4, torch.float16)
    assert isinstance(make_operations(PagedKVCache(shape, 2)), CpuOperations)
    assert isinstance(make_operations(PagedKVCache(shape, 2, "meta")), TorchOperations)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")
@pytest.mark.parametrize("head_dim, compiled", [(8, True), (6, False)])
def test_what_the_cuda_operators_cannot_move_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, compiled: bool
) -> None:
    """They move 16 bytes at once. The cache is on the CPU, and only says that it is not."""
    from kvllm.kvcache.ops.gpu import GpuOperations, copy_blocks

    class OnDevice(torch.Tensor):
        is_cpu, is_cuda = False, True

    monkeypatch.setattr(registry, "has_cuda_operators", lambda: True)
    cache = PagedKVCache(CacheShape(1, 1, head_dim, 4, torch.bfloat16), 2)
    cache.data = cache.data.as_subclass(OnDevice)
    operations = make_operations(cache)
    assert isinstance(operations, GpuOperations)
    assert (operations._copy_blocks is not copy_blocks) == compiled


@pytest.mark.parametrize("part", ["keys", "values"])
def test_gathered_keys_and_values_are_those_of_the_blocks(part: str) -> None:
    cache = make_cache()
    tables = torch.tensor([[3, 0], [8, 8]], dtype=torch.int32)
    found = getattr(make_operations(cache), f"gather_{part}")([0, 1], tables, 7)
    assert found.shape == (4, 3, 7, 6)
    for layer, sequence, index in np.ndindex(2, 2, 7):
        stored = getattr(cache, part)(layer)[tables[sequence, index // 4].item(), :, index % 4]
        assert torch.equal(found[2 * layer + sequence, :, index], stored)


@pytest.mark.parametrize("name", [None, *KV_FORMATS])
def test_norms_of_values_are_those_of_what_is_gathered(name: str | None) -> None:
    """Few bits are not rotated for them."""
    kv_format = KV_FORMATS[name] if name else None
    cache = PagedKVCache(CacheShape(2, 2, 64, 4, torch.float32, kv_format=kv_format), 9)
    values = torch.randn(2, 9, 2, 4, 64, generator=torch.Generator().manual_seed(0))
    for part, encoded in zip(cache.planes[1].parts, cache.planes[1].encode(values), strict=True):
        part.copy_(encoded)
    operations, tables = make_operations(cache), torch.tensor([[3, 0], [8, 8]], dtype=torch.int32)
    expected = operations.gather_values([0, 1], tables, 7).norm(dim=-1)
    torch.testing.assert_close(operations.value_norms([0, 1], tables, 7), expected, rtol=1e-5, atol=1e-5)
