"""G-KV (Liao et al., arXiv 2512.00504): R-KV whose attention is remembered from one compression to the next.

The attention of the last queries tells what matters now. A KV pair that mattered before keeps that score, which decays
with every compression, so it is not dropped in the first stretch of text that does not ask for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvllm.compression.mass import queries_per_tile
from kvllm.compression.methods import rkv
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.precision import no_tf32
from kvllm.compression.region import check_queries, everything, keeps_everything, with_buffer


def select(
    queries: Tensor, keys: Tensor, *, retain: int, buffer: int, decay: float = 0.8, mix: float = 0.5, carried: Tensor
) -> Tensor:
    """Choose the KV pairs of a region to keep, per sequence and KV head.

    The attention of a KV pair, relative to the head's highest, or its earlier score times `decay` if that is higher, is
    its score. `mix` of it is weighed against `1 - mix` of its redundancy, relative to the highest, too.

    Args:
        queries: `[S, Hq, query tokens, d]`, rotated; those of the region's last KV pairs.
        keys: `[S, Hkv, C, d]`, rotated.
        retain: KV pairs kept of the C, buffer included; everything is kept if `retain >= C`.
        buffer: the last KV pairs of the region, always kept.
        carried: float32 `[S, Hkv, C]`, the scores that this function gave before, 0 where it gave none. The scores that
            it gives now take their place.

    Returns:
        int64 `[S, Hkv, min(retain, C)]`: ascending offsets in the region.
    """
    if carried.shape != keys.shape[:3]:
        raise ValueError(f"carried {tuple(carried.shape)} must be [S, Hkv, C] for keys {tuple(keys.shape)}")
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    check_queries(queries, keys)
    num_scored = keys.shape[2] - buffer
    scores = []
    for seq_queries, seq_keys, earlier in zip(queries, keys, carried, strict=True):
        local = _relative(attention(seq_queries, seq_keys)[:, :num_scored])
        earlier[:, :num_scored] = torch.maximum(decay * earlier[:, :num_scored], local)
        earlier[:, num_scored:] = 0
        redundant = _relative(rkv.redundancy(seq_keys)[:, :num_scored])
        scores.append(mix * earlier[:, :num_scored] - (1 - mix) * redundant)
    return with_buffer(top_indices(torch.stack(scores), retain - buffer), keys, buffer)


def _relative(scores: Tensor) -> Tensor:
    highest = scores.amax(dim=-1, keepdim=True)
    return scores / highest.clamp(min=torch.finfo(scores.dtype).tiny)  # all of them may have vanished


@torch.no_grad()
@no_tf32()
def attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Mean attention of one sequence's last query tokens, of which the query heads of a KV head give the highest.

    Args:
        queries: `[Hq, query tokens, d]` and
        keys: `[Hkv, C, d]`, bfloat16 or float32; query token i of w attends to all keys up to its own, `C - w + i`.

    Returns:
        float32 `[Hkv, C]`.
    """
    num_kv_heads, length, head_dim = keys.shape
    num_tokens, group = queries.shape[1], queries.shape[0] // num_kv_heads
    by_token = queries.float().contiguous().view(num_kv_heads, group, num_tokens, head_dim).transpose(1, 2)
    scaled_keys = (keys.float() * head_dim**-0.5).contiguous()
    index = torch.arange(length, device=keys.device)
    total = torch.zeros(num_kv_heads, length, device=keys.device)
    size = max(1, queries_per_tile(keys) // group)
    for begin in range(0, num_tokens, size):
        tile = by_token[:, begin : begin + size]
        last = index[length - num_tokens + begin :][: tile.shape[1], None, None]
        logits = torch.bmm(tile.flatten(1, 2), scaled_keys.mT).view(num_kv_heads, -1, group, length)
        total += logits.masked_fill_(index > last, -torch.inf).softmax(dim=-1).amax(dim=2).sum(dim=1)
    return total / num_tokens
