"""Compactor (Chari and Van Durme, arXiv 2507.08143): non-causal attention within chunks, and leverage of keys.

A KV pair is scored by the attention that all query tokens of its chunk pay to it, later and earlier ones, times the
length of its value, averaged over neighbours; and by the leverage of its key (`leverage`). Both are standardized over
the heads and KV pairs of a layer, and added. As in the authors' code, logits are not divided by the root of d.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvllm.compression import MethodSpec, Option, register
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.precision import no_tf32
from kvllm.compression.region import check_queries, everything, keeps_everything, with_buffer, with_sinks
from kvllm.compression.rotation import unrotate
from more_methods import leverage

KERNEL = 3
"""KV pairs that attention is averaged over."""


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    values: Tensor,
    starts: Sequence[int],
    last_positions: Sequence[int],
    frequencies: Tensor,
    layer: int,
    blend: float = 0.35,
    attention_chunk: int = 256,
    sketch: int = 48,
    sinks: int = 8,
) -> Tensor:
    """Choose the KV pairs of a window to keep, per sequence and KV head. The buffer takes no part in the scores.

    Args:
        queries: `[S, Hq, W, d]`, rotated.
        keys: `[S, Hkv, W, d]`, rotated, of successive positions; query head h reads KV head `h // (Hq // Hkv)`. All
            heads of the layer: scores are standardized over them.
        retain: KV pairs kept of the W, buffer included; everything is kept if `retain >= W`.
        buffer: the last positions of the window, always kept.
        values: `[S, Hkv, W, d]`.
        starts: for each sequence the KV pairs of its cache in front of the window.
        last_positions: for each sequence the position of its last key.
        frequencies: float32 `[d / 2]`, of the rotary embedding.
        layer, sketch: see `leverage`.
        blend: weight of the leverage, where attention has 1.
        attention_chunk: tokens whose queries attend to each other's keys.
        sinks: the first KV pairs of the cache, kept before all others; they take no part in the scores either.

    Returns:
        int64 `[S, Hkv, min(retain, W)]`: ascending offsets in the window.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    check_queries(queries, keys)
    num_scored = keys.shape[2] - buffer
    found = torch.zeros(*keys.shape[:2], num_scored, device=keys.device)
    for i, (start, last_position) in enumerate(zip(starts, last_positions, strict=True)):
        first = max(0, sinks - start)
        if first >= num_scored:
            continue
        unrotated = unrotate(keys[i], last_position, frequencies)[:, first:num_scored]
        received = attention(queries[i], keys[i, :, :num_scored], first, attention_chunk)
        weighted = received * values[i, :, first:num_scored].float().norm(dim=-1)
        pooled = avg_pool1d(weighted, KERNEL, stride=1, padding=KERNEL // 2)
        distinct = leverage.scores(unrotated, layer, sketch)
        found[i, :, first:] = blend * _standardized(distinct) + _standardized(pooled)
    return with_buffer(top_indices(with_sinks(found, starts, sinks), retain - buffer), keys, buffer)


@torch.no_grad()
@no_tf32()
def attention(queries: Tensor, keys: Tensor, first: int, attention_chunk: int) -> Tensor:
    """Attention that each key of one sequence receives from the query tokens of its chunk, summed over these and
    averaged over the query heads of a KV head.

    Args:
        queries: `[Hq, W, d]`, of the keys and those after them.
        keys: `[Hkv, n, d]`.
        first: where the first chunk begins. Keys in front of it are left out.

    Returns:
        float32 `[Hkv, n - first]`.
    """
    num_kv_heads, num_keys, head_dim = keys.shape
    group = queries.shape[0] // num_kv_heads
    of_chunks = []
    for begin in range(first, num_keys, attention_chunk):
        end = min(begin + attention_chunk, num_keys)
        rows = queries[:, begin:end].float()
        head_rows = rows.reshape(num_kv_heads, -1, head_dim)
        logits = torch.bmm(head_rows, keys[:, begin:end].float().mT)
        of_chunks.append(torch.softmax(logits, dim=-1).sum(dim=1) / group)
    return torch.cat(of_chunks, dim=-1)


def _standardized(scores: Tensor) -> Tensor:
    """`[Hkv, n]` with the mean 0 and the deviation 1 over all of it."""
    return (scores - scores.mean()) / scores.std(correction=0).clamp(min=1e-6)


register(
    MethodSpec(
        "compactor",
        "what chunks attend to in both directions, and keys of leverage",
        "window",
        (Option("blend", 0.35, 0.0), Option("attention_chunk", 256, 1), leverage.SKETCH, Option("sinks", 8, 0)),
        whole_layer=True,
        unrotates=True,
    ),
    select,
)
