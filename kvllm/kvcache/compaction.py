"""Offsets kept of a region, from those kept of each of its windows."""

from __future__ import annotations

import torch


def region_indices(kept: torch.Tensor, window: int, overlap: int, tail: int) -> torch.Tensor:
    """Offsets that survive in one sequence's region.

    Args:
        kept: int64 `[layers, windows, kv_heads, retain]`, ascending offsets within each window, buffer included.
        window: KV pairs of a window.
        overlap: KV pairs that neighbouring windows share; they are kept or dropped as a part of the later window.
        tail: KV pairs between the last window and the end of the region; they move up after it.

    Returns:
        int64 `[layers, kv_heads, kept]`, strictly ascending offsets in the region.
    """
    num_windows, retain = kept.shape[1], kept.shape[3]
    stride = window - overlap
    parts = [kept[:, i, :, : retain - overlap] + i * stride for i in range(num_windows - 1)]
    parts.append(kept[:, -1] + (num_windows - 1) * stride)
    if tail:
        end = (num_windows - 1) * stride + window
        tail_slots = torch.arange(end, end + tail, device=kept.device)
        parts.append(tail_slots.expand(kept.shape[0], kept.shape[2], tail))
    return torch.cat(parts, dim=-1)


def pad(offsets: list[torch.Tensor]) -> torch.Tensor:
    """Stack `[..., kept]` tensors of different lengths over a new second dimension, filled with -1."""
    longest = max(kept.shape[-1] for kept in offsets)
    padded = [torch.nn.functional.pad(kept, (0, longest - kept.shape[-1]), value=-1) for kept in offsets]
    return torch.stack(padded, dim=1)
