"""PyramidKV (Cai et al., arXiv 2406.02069): SnapKV's scores, with a budget that falls from layer to layer."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

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


def layer_budgets(num_layers: int, length: int, retain: int, buffer: int, beta: int = 20) -> list[int]:
    """KV pairs kept beside the buffer, by layer: a falling line, rounded to the sum `num_layers * (retain - buffer)`.

    The last layer has `1 / beta` of the mean, or more where the first one would exceed the `length - buffer` there
    are. The exact fractions are rounded by largest remainder; of equals, the lower layer rounds up.
    """
    mean = min(retain, length) - buffer
    if num_layers == 1:
        return [mean]
    first = min(2 * mean - Fraction(mean, beta), Fraction(length - buffer))
    step = 2 * (first - mean) / (num_layers - 1)
    exact = [first - layer * step for layer in range(num_layers)]
    budgets = [math.floor(budget) for budget in exact]
    by_remainder = sorted(range(num_layers), key=lambda layer: budgets[layer] - exact[layer])
    for layer in by_remainder[: num_layers * mean - sum(budgets)]:
        budgets[layer] += 1
    return budgets
