"""StreamingLLM (Xiao et al., arXiv 2309.17453): keep the first KV pairs, the attention sinks, and the last ones.

Keys keep the rotation of their true positions; the original rotates them by their place in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(queries: Tensor | None, keys: Keys, *, retain: int, buffer: int, sinks: int = 4) -> Tensor:
    """Keep the first `sinks` and the last `retain - sinks` KV pairs of a region.

    Args:
        queries: not used.
        keys: `[S, Hkv, C, d]`.
        retain: KV pairs kept of the C; everything is kept if `retain >= C`.
        buffer: the last KV pairs of the region, always kept: only `retain - buffer` sinks may be.

    Returns:
        int64 `[S, Hkv, min(retain, C)]`: ascending offsets in the region.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    num_sinks = min(sinks, retain - buffer)
    first = torch.arange(num_sinks, device=keys.device).expand(*keys.shape[:2], num_sinks)
    return with_buffer(first, keys, retain - num_sinks)
