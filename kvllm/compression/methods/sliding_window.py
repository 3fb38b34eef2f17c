"""Sliding window: keep the last KV pairs."""

from __future__ import annotations

from torch import Tensor

from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import everything, keeps_everything


def select(queries: Tensor | None, keys: Keys, *, retain: int, buffer: int) -> Tensor:
    """Keep the last `retain` KV pairs of a region, the `buffer` among them."""
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    return everything(keys)[..., keys.shape[2] - retain :]
