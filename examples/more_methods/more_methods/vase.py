"""VaSE (Chang et al., arXiv 2606.03928): keep the largest values, and a sample of what the last queries attend to.

A few values have an unusual range. Without them a reasoning model repeats itself, so they are never evicted. The other
KV pairs are drawn without replacement, each with a chance in proportion to its attention: so heads and layers differ in
what they lose. This is the variant VaSE-AttnV. Its public code protects 200 KV pairs of budgets from 1,024 to 4,096;
here it is a share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvllm.compression import MethodSpec, Option, register
from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, batched_attention_mass
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.region import check_queries, everything, keeps_everything, with_buffer, with_sinks

KERNEL = 5
"""KV pairs that attention is averaged over."""


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    values: Tensor,
    starts: Sequence[int],
    seeds: Sequence[int],
    layer: int,
    protected: float = 0.1,
    sinks: int = 4,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, per sequence and KV head.

    Args:
        queries: `[S, Hq, query tokens, d]`, rotated; those of the region's last KV pairs.
        keys: `[S, Hkv, C, d]`, rotated; query head h reads KV head `h // (Hq // Hkv)`. All heads of the layer: they are
            numbered to draw lots.
        retain: KV pairs kept of the C, buffer included; everything is kept if `retain >= C`.
        buffer: the last KV pairs of the region, always kept.
        values: `[S, Hkv, C, d]`.
        starts: for each sequence the KV pairs of its cache in front of the region.
        seeds: one per sequence, at least 0. The same seed draws the same lots in a region of the same length.
        layer: makes the layers of a sequence differ.
        protected: share of the KV pairs kept, buffer aside, that goes to the values of the greatest range.
        sinks: the first KV pairs of the cache, which are protected before those.
        softmax: of the layer.

    Returns:
        int64 `[S, Hkv, min(retain, C)]`: ascending offsets in the region.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    check_queries(queries, keys)
    num_scored, total = keys.shape[2] - buffer, retain - buffer
    ranges = values[:, :, :num_scored].float()
    ranges = with_sinks(ranges.amax(dim=-1) - ranges.amin(dim=-1), starts, sinks)
    lasting = top_indices(ranges, int(protected * total))
    attention = scores(queries, keys, num_scored, softmax)
    # The greatest quotients by exponential lots are a sample without replacement (Efraimidis and Spirakis).
    drawn = (attention / _lots(attention, seeds, layer)).scatter(-1, lasting, torch.inf)
    return with_buffer(top_indices(drawn, total), keys, buffer)


def scores(queries: Tensor, keys: Tensor, num_scored: int, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """Attention of the query tokens to the first `num_scored` keys and to these only, averaged over neighbours.

    Returns:
        float32 `[S, Hkv, num_scored]`, bit-identical for a sequence whatever the others in the batch are.
    """
    mass = batched_attention_mass(queries, keys, num_scored, softmax=softmax)
    return torch.stack([avg_pool1d(of_sequence, KERNEL, stride=1, padding=KERNEL // 2) for of_sequence in mass])


def _lots(attention: Tensor, seeds: Sequence[int], layer: int) -> Tensor:
    """Exponential numbers, the same ones on any device."""
    if len(seeds) != len(attention):
        raise ValueError(f"{len(seeds)} seeds for {len(attention)} sequences: give one for each")
    lots = [np.random.default_rng((seed, layer)).exponential(size=tuple(attention.shape[1:])) for seed in seeds]
    return torch.from_numpy(np.stack(lots)).to(attention)


register(
    MethodSpec(
        "vase",
        "the largest values, and a sample of what the last queries attend to",
        "recent",
        (Option("protected", 0.1, 0.0, 1.0), Option("sinks", 4, 0)),
        whole_layer=True,
    ),
    select,
)
