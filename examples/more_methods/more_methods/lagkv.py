"""LagKV (Liang et al., arXiv 2504.04704): keep the KV pairs that stand out against those that follow.

The region is cut into chunks. Keys and values of a chunk are put in relation to the least and the greatest value that
each channel takes in the chunk behind it; a KV pair whose channels then differ most from each other stands out. Every
chunk keeps the same share. In the paper the last chunk and the rest behind it stay whole. Here the buffer does, so
chunks are counted from the buffer backwards; with a buffer of that length both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvllm.compression import MethodSpec, Option, register
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.region import everything, keeps_everything, with_buffer, with_sinks


def select(
    queries: Tensor | None,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    values: Tensor,
    starts: Sequence[int],
    lag: int = 128,
    sinks: int = 4,
) -> Tensor:
    """Choose the KV pairs of a region to keep, per sequence and KV head.

    Args:
        queries: not used.
        keys: `[S, Hkv, C, d]`, rotated.
        retain: KV pairs kept of the C; everything is kept if `retain >= C`.
        buffer: the last KV pairs of the region, always kept; in the paper from `lag` to `2 * lag - 1`.
        values: `[S, Hkv, C, d]`.
        starts: for each sequence the KV pairs of its cache in front of the region.
        lag: KV pairs of a chunk. The first one may be shorter.
        sinks: the first KV pairs of the cache, kept before all others.

    Returns:
        int64 `[S, Hkv, min(retain, C)]`: ascending offsets in the region.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    found = with_sinks(torch.zeros(*keys.shape[:2], keys.shape[2] - buffer, device=keys.device), starts, sinks)
    before = [min(max(0, sinks - start), found.shape[-1]) for start in starts]
    for first in set(before) - {found.shape[-1]}:  # most windows lie behind all sinks
        rows = [row for row, own in enumerate(before) if own == first]
        found[rows, :, first:] = scores(keys[rows], values[rows], buffer, first, lag)
    return with_buffer(top_indices(found, retain - buffer), keys, buffer)


@torch.no_grad()
def scores(keys: Tensor, values: Tensor, buffer: int, first: int, lag: int) -> Tensor:
    """Rank of each KV pair within its chunk, as a share: 1 for the one that stands out most.

    A chunk with fewer than two KV pairs behind it is compared with itself.

    Args:
        keys, values: `[S, Hkv, C, d]`, bfloat16 or float32; computed in float32.
        first: where the first chunk begins.

    Returns:
        float32 `[S, Hkv, C - buffer - first]`, of the KV pairs from `first` on.
    """
    length = keys.shape[2]
    found = []
    for end in range(length - buffer, first, -lag):
        begin = max(first, end - lag)
        chunk = slice(begin, end)
        reference = slice(end, end + lag) if length - end >= 2 else chunk
        outstanding = _outstanding(keys, chunk, reference) + _outstanding(values, chunk, reference)
        rank = outstanding.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        found.append(1 - rank / (end - begin))
    return torch.cat(found[::-1], dim=-1)


def _outstanding(states: Tensor, chunk: slice, reference: slice) -> Tensor:
    """Softmax over a chunk of the spread of its channels, relative to those of the reference: `[S, Hkv, chunk]`."""
    of_reference = states[:, :, reference].float()
    least = of_reference.amin(dim=2, keepdim=True)
    extent = of_reference.amax(dim=2, keepdim=True) - least
    # A channel that is constant in the reference has no scale, and says nothing.
    relative = ((states[:, :, chunk].float() - least) / extent).masked_fill(extent == 0, 0.0)
    return relative.std(dim=-1).softmax(dim=-1)


register(
    MethodSpec(
        "lagkv",
        "what stands out against the KV pairs that follow",
        options=(Option("lag", 128, 2), Option("sinks", 4, 0)),
    ),
    select,
)
