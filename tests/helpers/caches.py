"""Caches of any bits, and what a compaction does to them, written out."""

from __future__ import annotations

import numpy as np
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS


def head_dim_for(kv_cache_dtype: str, head_dim: int) -> int:
    """The same, or the next one that a format can have: a power of two if it rotates vectors."""
    keys = KV_FORMATS[kv_cache_dtype].keys
    if keys.rotated:
        return max(keys.channels, 1 << (head_dim - 1).bit_length())
    return -(-head_dim // keys.channels) * keys.channels


def random_cache(dtype: torch.dtype, *, num_blocks: int = 12, head_dim: int = 48, shared: bool = False) -> PagedKVCache:
    """Any bits, NaNs among them, so that a copy by arithmetic would show. shared: values are the keys."""
    cache = PagedKVCache(CacheShape(2, 3, head_dim, 16, dtype, shared=shared), num_blocks)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(bits)
    cache.data.view(bits).random_(limits.min, limits.max, generator=torch.Generator().manual_seed(0))
    return cache


def random_kept(
    num_layers: int, lengths: list[int], num_heads: int, counts: list[int], *, ragged: bool
) -> torch.Tensor:
    """Ascending offsets below `lengths[s]`, about `counts[s]` of them, padded by -1."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.full((num_layers, len(lengths), num_heads, max(counts)), -1)
    for layer, sequence, head in np.ndindex(*kept.shape[:3]):
        count = counts[sequence] - (layer + head if ragged else 0)
        chosen = torch.randperm(lengths[sequence], generator=generator)[:count].sort().values
        kept[layer, sequence, head, :count] = chosen
    return kept


def literal_compaction(
    data: torch.Tensor, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
) -> torch.Tensor:
    """Pair by pair, reading from the cache as it was."""
    block_size = data.shape[4]
    result = data.clone()
    for layer, sequence, head in np.ndindex(*kept.shape[:3]):
        for new, old in enumerate(o for o in kept[layer, sequence, head].tolist() if o >= 0):
            source, destination = sources[sequence, old // block_size], destinations[sequence, new // block_size]
            row = data[layer, :, source, head, old % block_size]
            result[layer, :, destination, head, new % block_size] = row
    return result
