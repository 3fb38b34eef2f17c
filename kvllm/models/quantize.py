"""Weights of 8 or 4 bits, made from those of a checkpoint when it is loaded.

A weight is an integer times a scale. With 8 bits, a row of the matrix has one scale, and its largest weight becomes 127
or -127. With 4 bits, each group of 128 weights of a row has one, and its largest weight becomes -8.
"""

from __future__ import annotations

import torch

GROUP_SIZES = (128, 64, 32)
"""Sizes of a group with 4 bits: the first that divides a row."""
TILE = 16
"""Rows of a matrix that the CPU's kernels read together."""
WORD = 4
"""Bytes of a row that lie together there."""


def group_size(in_features: int, bits: int) -> int | None:
    """Weights of a row that share a scale; None where a row cannot be held in `bits`."""
    if in_features % (32 // bits):
        return None
    sizes = GROUP_SIZES if bits == 4 else ()
    return next((size for size in sizes if in_features % size == 0), in_features)


def packed_form(tiles: int, in_features: int, bits: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the integers of tiles."""
    shape = (tiles, in_features * bits // 32, TILE)
    return ((*shape, WORD), torch.int8) if bits == 8 else (shape, torch.int32)


def quantize(matrix: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix `[out, in]` as integers, int8 `[out, in]`, and scales float32 `[out, in / group]`."""
    weights = matrix.float().unflatten(1, (-1, group))
    largest = weights.gather(2, weights.abs().argmax(2, keepdim=True))
    scales = largest.abs() / 127 if bits == 8 else largest / -8
    integers = (weights / scales.masked_fill(scales == 0, 1)).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return integers.flatten(1).to(torch.int8), scales.squeeze(2)


def pack_integers(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 `[out, in]` -> int32 `[out, words]`: four integers of 8 bits or eight of 4, the lowest bits first."""
    if bits == 8:
        return integers.contiguous().view(torch.int32)
    low, high = integers.contiguous().view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return (low & 15 | high << 4).view(torch.int32)


def dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` (int64 `[T]`) of the matrix: float32 `[T, in]`."""
    words, scale = packed[indices // TILE, :, indices % TILE], scales[indices // TILE, :, indices % TILE]
    if packed.dtype == torch.int32:
        words = words.unsqueeze(-1) << torch.arange(28, -1, -4, dtype=torch.int32) >> 28
    return (words.flatten(1).unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
