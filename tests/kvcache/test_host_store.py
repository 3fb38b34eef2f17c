"""Blocks that go to host memory and come back."""

from __future__ import annotations

import pytest
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.quantize import CODECS
from kvllm.kvcache.tiers.host import HostStore

CPU = torch.device("cpu")
SHAPES = {
    "bfloat16": CacheShape(3, 2, 24, 5, torch.bfloat16),
    "float32 with scores": CacheShape(3, 2, 24, 16, torch.float32, scored=True),
    "int8": CacheShape(3, 2, 24, 5, torch.float32, kv_format=KV_FORMATS["int8"]),
    "values are keys, with scores": CacheShape(3, 1, 24, 5, torch.bfloat16, scored=True, shared=True),
    "values are keys, int8": CacheShape(3, 1, 24, 5, torch.float32, kv_format=KV_FORMATS["int8"], shared=True),
    "int4_hadamard": CacheShape(3, 2, 32, 5, torch.float32, kv_format=KV_FORMATS["int4_hadamard"]),
    "int6_int4": CacheShape(3, 2, 16, 5, torch.float32, kv_format=KV_FORMATS["int6_int4"]),
    "int6_int4_hadamard": CacheShape(2, 2, 16, 5, torch.float32, kv_format=KV_FORMATS["int6_int4_hadamard"]),
    "int4, three layers in two places": CacheShape(
        3, 1, 24, 3, torch.float32, kv_format=KV_FORMATS["int4"], places=(0, 1, 0)
    ),
}


def random_cache(shape: CacheShape, num_blocks: int = 6) -> PagedKVCache:
    """Any bits, NaNs among them."""
    cache = PagedKVCache(shape, num_blocks)
    for tensor in (cache.data, cache.scores):
        if tensor is not None:
            tensor.view(torch.uint8).random_(0, 255)
    return cache


def block_bytes(cache: PagedKVCache, block: int) -> list[torch.Tensor]:
    """The block's bytes, with those of its scores."""
    found = [tensor[:, :, block].clone().view(torch.uint8) for tensor in cache.tensors]
    return found if cache.scores is None else [*found, cache.scores[:, block].clone().view(torch.uint8)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_blocks_come_back_bit_for_bit(shape: CacheShape) -> None:
    cache, store = random_cache(shape), HostStore(shape, 4, CPU)
    assert store.layout.record_bytes == shape.bytes_per_block
    before = [block_bytes(cache, block) for block in range(6)]
    store.store(cache, [4, 1], [0, 3])
    cache.data.zero_()  # at once: a copy was taken
    store.store(cache, [0], [1])
    store.load(7, [3, 0], cache, [2, 5])
    ended = store.ended(wait=True)
    assert (ended.loaded, ended.lost, ended.num_blocks >= 2) == ([7], [], True) and ended.seconds > 0
    assert_equal(block_bytes(cache, 2), before[1])
    assert_equal(block_bytes(cache, 5), before[4])
    assert not block_bytes(cache, 3)[0].any()
    assert store.ended(wait=True)[:2] == ([], [])


def test_a_host_block_may_be_stored_over_while_a_load_reads_it() -> None:
    shape = SHAPES["bfloat16"]
    cache, store = random_cache(shape, 40), HostStore(shape, 1, CPU)
    before = [block_bytes(cache, block) for block in range(20)]
    for i in range(20):
        store.store(cache, [i], [0])
        store.load(i, [0], cache, [20 + i])
    assert sorted(store.ended(wait=True).loaded) == list(range(20))
    for i in range(20):
        assert_equal(block_bytes(cache, 20 + i), before[i])


def test_values_that_are_keys_are_quantized_once() -> None:
    shape = CacheShape(2, 1, 16, 4, torch.bfloat16, scored=True, shared=True)
    cache, store = PagedKVCache(shape, 3), HostStore(shape, 2, CPU, KV_FORMATS["int8"])
    cache.data.normal_()
    assert cache.scores is not None
    cache.scores.normal_()
    assert store.layout.record_bytes == 2 * 4 * (KV_FORMATS["int8"].pair_bytes(16) // 2 + 4)
    expected = CODECS["int8"].dequantize(*CODECS["int8"].quantize(cache.data[:, :, 0])).bfloat16()
    scores = cache.scores[:, 0].clone()
    store.store(cache, [0], [1])
    store.load(0, [1], cache, [2])
    assert store.ended(wait=True).loaded == [0]
    assert torch.equal(cache.data[:, :, 2], expected) and torch.equal(cache.scores[:, 2], scores)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_keys_and_values_are_quantized_on_their_way(name: str) -> None:
    shape = CacheShape(2, 2, 16, 4, torch.bfloat16, scored=True)
    cache, store = PagedKVCache(shape, 3), HostStore(shape, 2, CPU, KV_FORMATS[name])
    cache.data.normal_()
    assert cache.scores is not None
    cache.scores.normal_()
    assert store.layout.record_bytes == 2 * 2 * 4 * (KV_FORMATS[name].pair_bytes(16) + 4)
    codecs = (CODECS[each.name] for each in (KV_FORMATS[name].keys, KV_FORMATS[name].values))
    planes = zip(codecs, cache.data[:, :, 0].unbind(1), strict=True)
    expected = torch.stack([codec.dequantize(*codec.quantize(plane)) for codec, plane in planes], dim=1).bfloat16()
    scores = cache.scores[:, 0].clone()
    store.store(cache, [0], [1])
    store.load(0, [1], cache, [2])
    assert store.ended(wait=True).loaded == [0]
    assert torch.equal(cache.data[:, :, 2], expected) and torch.equal(cache.scores[:, 2], scores)


def test_what_is_not_held_is_reported_as_lost() -> None:
    shape = SHAPES["bfloat16"]
    cache, store = random_cache(shape), HostStore(shape, 3, CPU)
    store.store(cache, [0, 1], [0, 1])
    store.load(0, [0, 2], cache, [4, 5])  # nothing was stored in 2
    store.load(1, [0, 1], cache, [2, 3])
    ended = store.ended(wait=True)
    assert (ended.loaded, ended.lost) == ([1], [0])
    store.records = (torch.empty(0),)  # from now on no block can be written
    store.store(cache, [3], [0])
    store.load(2, [0], cache, [4])
    assert store.ended(wait=True).lost == [2]


def test_a_cancelled_load_writes_nothing_any_more() -> None:
    shape = SHAPES["bfloat16"]
    cache, store = random_cache(shape, 60), HostStore(shape, 20, CPU)
    store.store(cache, list(range(20)), list(range(20)))
    for number in range(20):
        store.load(number, list(range(20)), cache, list(range(20, 40)))
    store.cancel(list(range(20)))
    cache.data[:, :, 20:40] = 0
    ended = store.ended(wait=True)
    assert not cache.data[:, :, 20:40].view(torch.uint8).any()
    assert sorted(ended.lost) == list(range(20)) and not ended.loaded
