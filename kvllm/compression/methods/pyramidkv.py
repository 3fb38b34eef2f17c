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
    """Choose the KV pairs of a region to keep in one layer, per sequence and KV head.

    Args:
        queries: `[S, Hq, query tokens, d]`, rotated; those of the region's last KV pairs.
        keys: `[S, Hkv, C, d]`, rotated; query head h reads KV head `h // (Hq // Hkv)`. C is the same in all
            layers.
        retain: KV pairs kept of the C in the mean over the layers, buffer included; everything is kept if
            `retain >= C`.
        buffer: the last KV pairs of the region, always kept.
        capacity: the most KV pairs one layer may keep, buffer included (default: C).
        layer: number of the layer among the `num_layers`, from 0.
        evicted_mask: bool `[S, Hkv, C]`, slots that an earlier selection left without a KV pair, none of them in
            the buffer. They are neither attended to nor kept.
        softmax: of the layer.

    Returns:
        int64 `[S, Hkv, layer_budgets(...)[layer] + buffer]`: ascending offsets in the region.
    """
    length = keys.shape[2] if capacity is None else min(capacity, keys.shape[2])
    budget = layer_budgets(num_layers, length, retain, buffer)[layer]
    return snapkv.select(
        queries, keys, retain=budget + buffer, buffer=buffer, evicted_mask=evicted_mask, softmax=softmax
    )
