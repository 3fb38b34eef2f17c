"""Steps that all methods share: check the budget and the tensors, keep everything, keep the buffer."""

from __future__ import annotations

import torch
from torch import Tensor


def keeps_everything(keys: Tensor, retain: int, buffer: int) -> bool:
    """Whether all C KV pairs of the region `keys [S, Hkv, C, d]` survive."""
    length = keys.shape[2]
    if not 0 <= buffer <= min(retain, length):
        raise ValueError(f"buffer={buffer} must be between 0 and retain={retain} and the window of {length} positions")
    return retain >= length


def everything(keys: Tensor) -> Tensor:
    """All offsets, int64 `[S, Hkv, C]`."""
    return torch.arange(keys.shape[2], device=keys.device).repeat(*keys.shape[:2], 1)


def with_buffer(kept: Tensor, keys: Tensor, buffer: int) -> Tensor:
    """Ascending offsets `kept [S, Hkv, k]` below `C - buffer`, followed by the last `buffer` of the C."""
    length = keys.shape[2]
    last = torch.arange(length - buffer, length, device=keys.device)
    return torch.cat((kept, last.expand(*kept.shape[:2], buffer)), dim=-1)


def check_queries(queries: Tensor, keys: Tensor) -> None:
    """Check `queries [S, Hq, query tokens, d]` against `keys [S, Hkv, C, d]`. Raises ValueError."""
    num_seqs, num_heads, num_tokens, head_dim = queries.shape
    if num_heads % keys.shape[1] or keys.shape[0] != num_seqs or keys.shape[3] != head_dim or num_tokens == 0:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be [S, Hq, query tokens, d] and "
            "[S, Hkv, W, d] with at least one query token and Hq a multiple of Hkv"
        )
