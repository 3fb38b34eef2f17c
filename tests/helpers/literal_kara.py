"""Kara's scores and Token2Chunk, written out as the paper says them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch


def window_tensors(seed, num_seqs, num_heads, num_kv_heads, window, head_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_seqs, num_heads, window, head_dim, generator=generator) * 2
    keys = torch.randn(num_seqs, num_kv_heads, window, head_dim, generator=generator)
    return queries.to(dtype), keys.to(dtype)


def dense_scores(queries, keys, buffer):
    """Eq. 4 at once, in float64, with the keys repeated for the query heads."""
    num_seqs, num_heads, _, head_dim = queries.shape
    num_kv_heads, num_scored = keys.shape[1], keys.shape[2] - buffer
    keys = keys[:, :, :num_scored].double().repeat_interleave(num_heads // num_kv_heads, dim=1)
    probabilities = torch.softmax(queries.double() @ keys.mT / head_dim**0.5, dim=-1)
    return probabilities.view(num_seqs, num_kv_heads, -1, num_scored).sum(dim=2)


def literal_token2chunk(scores, total, chunk_budget, max_chunk):
    """Token2Chunk in plain Python for one row of float32 scores."""
    if total >= len(scores):
        return list(range(len(scores)))
    ranking = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    candidates = sorted(ranking[: max(total - chunk_budget, 0)])
    rewards = []
    for m, (left, right) in enumerate(pairwise(candidates)):
        if 1 < right - left < max_chunk:
            reward = np.float32(np.float32(scores[left] + scores[right]) * np.float32(right - left - 1))
            rewards.append((-reward, m))
    kept = set(candidates)
    for _, m in sorted(rewards)[: chunk_budget // (max_chunk - 2)]:
        kept.update(range(candidates[m] + 1, candidates[m + 1]))
    for j in ranking:
        if len(kept) < total:
            kept.add(j)
    return sorted(kept)
