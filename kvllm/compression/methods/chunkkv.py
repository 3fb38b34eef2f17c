"""ChunkKV (Liu et al., arXiv 2502.00299): keep whole chunks of neighbours, the same ones in all heads of a layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.compression.methods import snapkv
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(
    queries: Tensor, keys: Tensor, *, retain: int, buffer: int, chunk: int = 10, softmax: Softmax = PLAIN_SOFTMAX
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says: whole chunks, the same in all heads.

    Args:
        queries: those of the region's last KV pairs.
        keys: of all heads of the layer: a part of them decides differently.
        chunk: KV pairs of a chunk. The last one may be shorter.
        softmax: of the layer.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    kept = best_chunks(snapkv.scores(queries, keys, buffer, kernel=1, softmax=softmax), retain - buffer, chunk)
    return with_buffer(kept[:, None].expand(-1, keys.shape[1], -1), keys, buffer)


def best_chunks(scores: Tensor, total: int, chunk: int) -> Tensor:
    """Exactly `total` positions: the best chunks whole, and the first ones of the one that no longer fits.

    Args:
        scores: float32 `[S, Hkv, n]`, by position.

    Returns:
        int64 `[S, min(total, n)]`, ascending.
    """
    # Positions of a chunk share its score, so the first of the stable order are the leading ones of a chunk.
    by_position = chunk_scores(scores, chunk).repeat_interleave(chunk, dim=-1)[:, : scores.shape[-1]]
    return top_indices(by_position, total)


def chunk_scores(scores: Tensor, chunk: int) -> Tensor:
    """Mean over the positions of each chunk of the sum over heads: `[S, Hkv, n]` -> float32 `[S, ceil(n / chunk)]`."""
    short = -scores.shape[-1] % chunk
    of_sequences = []
    for seq_scores in scores:
        totals = pad(seq_scores.sum(dim=0), (0, short)).view(-1, chunk).sum(dim=-1)
        lengths = torch.full_like(totals, chunk)
        lengths[-1] -= short
        of_sequences.append(totals / lengths)
    return torch.stack(of_sequences)
