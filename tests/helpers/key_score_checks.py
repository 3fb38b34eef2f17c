"""Scores of queries with the keys of a paged cache, against a dense product in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers.tensors import randn

SCALE = 0.3
TABLES = torch.tensor([[5, 0, 7, 8], [2, 6, 99, 99], [4, 99, 99, 99]], dtype=torch.int32)


def filled_cache(dtype: torch.dtype, name: str | None, head_dim: int, block_size: int) -> PagedKVCache:
    """Two layers with three KV heads."""
    shape = CacheShape(2, 3, head_dim, block_size, dtype, kv_format=KV_FORMATS[name] if name else None)
    cache = PagedKVCache(shape, 9)
    slots = torch.arange(9 * block_size)
    for layer in range(2):
        keys, values = randn(len(slots), 3, head_dim, dtype=dtype), randn(len(slots), 3, head_dim, dtype=dtype)
        TorchOperations(cache).store(layer, keys, values, slots)
    return cache


def literal_scores(cache: PagedKVCache, layer: int, queries: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """One product after the other, in float64."""
    num_seqs, num_tokens, num_heads, _ = queries.shape
    size, kv_heads = cache.shape.block_size, cache.shape.num_kv_heads
    group = num_heads // kv_heads
    keys = cache.planes[0].decode([part[layer] for part in cache.planes[0].parts], torch.float32).double()
    found = torch.full((num_seqs, kv_heads, num_tokens * group, TABLES.shape[1] * size), -torch.inf).double()
    for s in range(num_seqs):
        for token in range(num_tokens):
            for pair in range(int(last[s, token]) + 1):
                key = keys[TABLES[s, pair // size], :, pair % size].repeat_interleave(group, dim=0)
                products = (queries[s, token].double() * key).sum(-1) * SCALE
                found[s, :, token * group : (token + 1) * group, pair] = products.view(kv_heads, group)
    return found


def assert_scores(
    make: Callable[[PagedKVCache], KVOperations],
    name: str | None,
    dtype: torch.dtype,
    num_tokens: int,
    group: int,
    block_size: int,
) -> None:
    """Of sequences that fill their tables, end within a block, and have next to nothing yet.

    name: of the cache's format, None for keys of the dtype.
    """
    cache = filled_cache(dtype, name, 64 if name else 48, block_size)
    queries = randn(3, num_tokens, 3 * group, cache.shape.head_dim, dtype=dtype)
    ends = torch.tensor([4 * block_size - 1, min(block_size + 2, 2 * block_size - 1), min(num_tokens, block_size) - 2])
    last = (ends[:, None] - torch.arange(num_tokens).flip(0)).clamp(min=-1)
    scores = make(cache).key_scores(1, queries, TABLES.clamp(max=8), last.int(), SCALE)
    expected = literal_scores(cache, 1, queries, last)
    assert torch.equal(scores.isinf(), expected.isinf()) and scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=2e-3 if name else 1e-4)
