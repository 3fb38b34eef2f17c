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
    """Shape and dtype of the integers that `quantize` makes."""
    shape = (tiles, in_features * bits // 32, TILE)
    return ((*shape, WORD), torch.int8) if bits == 8 else (shape, torch.int32)


def quantize(matrix: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix `[out, in]` in the order in which the CPU's kernels read it.

    Returns:
        packed: 8 bits: int8 `[tiles, in / 4, 16, 4]`; 4 bits: int32 `[tiles, in / 8, 16]`, eight integers in each, the
            lowest bits first. Tile t has the rows from 16 * t on; the last is filled up with zeros.
        scales: float32 `[tiles, in / group, 16]`.
    """
    weights = matrix.float().unflatten(1, (-1, group))
    largest = weights.gather(2, weights.abs().argmax(2, keepdim=True))
    scales = largest.abs() / 127 if bits == 8 else largest / -8
    integers = (weights / scales.masked_fill(scales == 0, 1)).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return pack_integers(integers.flatten(1).to(torch.int8), scales.squeeze(2), bits)


def pack_integers(integers: torch.Tensor, scales: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers int8 `[out, in]` and scales float32 `[out, in / group]`, as `quantize` returns them."""
    missing = -len(integers) % TILE
    integers, scales = (
        torch.nn.functional.pad(each, (0, 0, 0, missing)).unflatten(0, (-1, TILE)) for each in (integers, scales)
    )
    integers = integers.unflatten(2, (-1, 32 // bits)).transpose(1, 2)
    packed = integers.contiguous() if bits == 8 else _nibbles(integers.to(torch.int32))
    return packed, scales.transpose(1, 2).contiguous()


def _nibbles(integers: torch.Tensor) -> torch.Tensor:
    """int32 `[..., 8]` -> `[...]`."""
    return ((integers & 15) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` (int64 `[T]`) of the matrix: float32 `[T, in]`."""
    words, scale = packed[indices // TILE, :, indices % TILE], scales[indices // TILE, :, indices % TILE]
    if packed.dtype == torch.int32:
        words = words.unsqueeze(-1) << torch.arange(28, -1, -4, dtype=torch.int32) >> 28
    return (words.flatten(1).unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
