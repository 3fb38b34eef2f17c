"""StreamingLLM (Xiao et al., arXiv 2309.17453): keep the first KV pairs, the attention sinks, and the last ones.

Keys keep the rotation of their true positions; the original rotates them by their place in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(queries: Tensor | None, keys: Keys, *, retain: int, buffer: int, sinks: int = 4) -> Tensor:
    """Keep the first `sinks` KV pairs of a region (`retain - buffer` at most), and the last ones."""
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    num_sinks = min(sinks, retain - buffer)
    first = torch.arange(num_sinks, device=keys.device).expand(*keys.shape[:2], num_sinks)
    return with_buffer(first, keys, retain - num_sinks)
