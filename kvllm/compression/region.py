"""Steps that all methods share: check the budget and the tensors, keep everything, the buffer, or the sinks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvllm.compression.paged_keys import Keys


def keeps_everything(keys: Keys, retain: int, buffer: int) -> bool:
    """Whether all C KV pairs of the region `keys [S, Hkv, C, d]` survive."""
    length = keys.shape[2]
    if not 0 <= buffer <= min(retain, length):
        raise ValueError(f"buffer={buffer} must be between 0 and retain={retain} and the window of {length} positions")
    return retain >= length


def everything(keys: Keys) -> Tensor:
    """All offsets, int64 `[S, Hkv, C]`."""
    return torch.arange(keys.shape[2], device=keys.device).repeat(*keys.shape[:2], 1)


def with_buffer(kept: Tensor, keys: Keys, buffer: int) -> Tensor:
    """Ascending offsets `kept [S, Hkv, k]` below `C - buffer`, followed by the last `buffer` of the C."""
    return with_last(kept, keys.shape[2], buffer)


def with_last(kept: Tensor, length: int, buffer: int) -> Tensor:
    """`with_buffer` for a region of `length` KV pairs."""
    last = torch.arange(length - buffer, length, device=kept.device)
    return torch.cat((kept, last.expand(*kept.shape[:2], buffer)), dim=-1)


def with_sinks(scores: Tensor, starts: Sequence[int], sinks: int) -> Tensor:
    """`scores [S, Hkv, n]` of a region with infinity for the first `sinks` KV pairs of a cache, the attention sinks.

    starts: for each row the KV pairs of its cache in front of the region. Most windows lie after all sinks.
    """
    if len(starts) != len(scores):
        raise ValueError(f"{len(starts)} starts for {len(scores)} rows: give one for each")
    before = torch.tensor([max(0, sinks - start) for start in starts], device=scores.device)
    is_sink = torch.arange(scores.shape[-1], device=scores.device) < before[:, None, None]
    return scores.masked_fill(is_sink, torch.inf)


def check_queries(queries: Tensor | None, keys: Keys) -> Tensor:
    """`queries [S, Hq, query tokens, d]`, checked against `keys [S, Hkv, C, d]`. Raises ValueError."""
    if queries is None:
        raise ValueError("the queries of the window are missing, and no scores were observed")
    num_seqs, num_heads, num_tokens, head_dim = queries.shape
    if num_heads % keys.shape[1] or keys.shape[0] != num_seqs or keys.shape[3] != head_dim or num_tokens == 0:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be [S, Hq, query tokens, d] and "
            "[S, Hkv, W, d] with at least one query token and Hq a multiple of Hkv"
        )
    return queries
