"""Token2Chunk: spend a part of the budget on completing chunks of text (Kara paper, Eq. 6-8 and C.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvllm._extension import operator
from kvllm.compression.region import with_last


def top_indices(scores: Tensor, k: int) -> Tensor:
    """Ascending int64 positions `[..., min(k, n)]` of the k highest of `scores [..., n]`; of equals, the first wins."""
    if _is_for_operator(scores):
        return operator("choose_chunks")(scores.contiguous(), k, 0, 3)
    # torch.topk promises no order among equal values.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :k].sort(dim=-1).values


def choose(scores: Tensor, *, retain: int, buffer: int, chunk_budget: int = 0, max_chunk: int = 3) -> Tensor:
    """The KV pairs of regions to keep: `expand`, and the buffer after them.

    Args:
        scores: `[S, Hkv, C - buffer]`, floating point and finite.
        retain: KV pairs kept of the C, buffer included.

    Returns:
        int64 `[S, Hkv, min(retain, C)]`: ascending offsets in the region.
    """
    kept = expand(scores, retain - buffer, chunk_budget, max_chunk)
    return with_last(kept, scores.shape[-1] + buffer, buffer)


def expand(scores: Tensor, total: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """Choose `total` positions: the best ones, then the best gaps between them, then what scores best of the rest.

    The candidates are the top `total - chunk_budget` positions. A gap between neighbouring candidates that is
    shorter than `max_chunk` joins them to a chunk; the most rewarding `chunk_budget // (max_chunk - 2)` gaps are
    filled in. The rest of the budget goes to the highest scores not kept yet, so every row keeps `total`.

    Args:
        scores: `[..., n]`, floating point and finite.
        total: positions to keep of the n; all of them if `total >= n`.
        chunk_budget: how many of `total` are not candidates (alpha), at least 0.
        max_chunk: longest chunk, both ends counted (gamma), at least 3.

    Returns:
        int64 `[..., min(total, n)]`, ascending.
    """
    if total < 0 or chunk_budget < 0 or max_chunk < 3:
        raise ValueError(
            f"total={total}, chunk_budget={chunk_budget}, max_chunk={max_chunk}: at least 0, 0 and 3 are required"
        )
    if _is_for_operator(scores):
        return operator("choose_chunks")(scores.contiguous(), total, chunk_budget, max_chunk)
    num_candidates = total - chunk_budget
    max_chunks = chunk_budget // (max_chunk - 2)
    if total >= scores.shape[-1] or num_candidates < 2 or max_chunks == 0:
        return top_indices(scores, total)
    candidates = top_indices(scores, num_candidates)
    interior = _chunk_interior(scores, candidates, max_chunks, max_chunk)
    kept_first = scores.scatter(-1, candidates, torch.inf).scatter(-1, interior, torch.inf)
    return top_indices(kept_first, total)


def _is_for_operator(scores: Tensor) -> bool:
    return scores.is_cpu and scores.dtype == torch.float32


def _chunk_interior(scores: Tensor, candidates: Tensor, max_chunks: int, max_chunk: int) -> Tensor:
    """Positions inside the chosen gaps, `[..., chunks * (max_chunk - 2)]`, padded with candidates.

    The reward of the gap between neighbours a < b is `(scores[a] + scores[b]) * (b - a - 1)`.
    """
    ends = scores.gather(-1, candidates)
    gaps = candidates.diff(dim=-1)
    rewards = (ends[..., :-1] + ends[..., 1:]) * (gaps - 1)
    admissible = (gaps > 1) & (gaps < max_chunk)
    chosen = top_indices(rewards.masked_fill(~admissible, -torch.inf), max_chunks)
    start = candidates.gather(-1, chosen).unsqueeze(-1)
    # A row with too few admissible gaps has chosen others as well: these add nothing.
    lengths = (gaps * admissible).gather(-1, chosen).unsqueeze(-1)
    offsets = torch.arange(1, max_chunk - 1, device=scores.device)
    return (start + offsets * (offsets < lengths)).flatten(-2)
