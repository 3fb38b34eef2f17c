"""What every method does with its region: check the budget and the tensors, keep everything, keep the buffer."""

from __future__ import annotations

import torch
from torch import Tensor


def keeps_everything(keys: Tensor, retain: int, buffer: int) -> bool:
    """Whether all C entries of the region `keys [S, Hkv, C, d]` survive."""
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
    """Hold `queries [S, Hq, rows, d]` against `keys [S, Hkv, C, d]`."""
    num_seqs, num_heads, num_rows, head_dim = queries.shape
    if num_heads % keys.shape[1] or keys.shape[0] != num_seqs or keys.shape[3] != head_dim or num_rows == 0:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be [S, Hq, rows, d] and [S, Hkv, W, d] "
            "with at least one row and Hq a multiple of Hkv"
        )
