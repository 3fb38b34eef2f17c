"""PyramidKV (Cai et al., arXiv 2406.02069): SnapKV's scores, with a budget that falls from layer to layer."""

from __future__ import annotations

from torch import Tensor

from kvllm.compression.layer_budgets import layer_budgets
from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.compression.methods import snapkv


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    layer: int,
    num_layers: int,
    capacity: int | None = None,
    evicted_mask: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says; layers keep `retain` in the mean.

    Args:
        queries: those of the region's last KV pairs.
        keys: C is the same in all layers.
        capacity: the most KV pairs one layer may keep, buffer included (default: C).
        evicted_mask: as for `snapkv.select`.

    Returns:
        int64 `[S, Hkv, layer_budgets(...)[layer] + buffer]`: ascending offsets in the region.
    """
    length = keys.shape[2] if capacity is None else min(capacity, keys.shape[2])
    budget = layer_budgets(num_layers, length, retain, buffer)[layer]
    return snapkv.select(
        queries, keys, retain=budget + buffer, buffer=buffer, evicted_mask=evicted_mask, softmax=softmax
    )
