"""Matrices of integers with a scale for each group of 16 or 32 weights, in the order in which the CPU reads them."""

from __future__ import annotations

import torch

from kvllm.files.groups import GroupForm, Groups
from kvllm.models.quantize import TILE, WORD

DTYPES = {4: torch.int32, 6: torch.uint8, 8: torch.int8}
"""Of packed integers, by their bits."""


def packed_shape(tiles: int, in_features: int, form: GroupForm) -> tuple[int, ...]:
    """Of the integers that `pack_groups` makes, which have a dtype of DTYPES."""
    return (tiles, in_features // 8, TILE) if form.bits == 4 else (tiles, in_features // WORD, TILE, WORD)


def scales_shape(tiles: int, in_features: int, form: GroupForm) -> tuple[int, ...]:
    """Of the scales, and minimums, that `pack_groups` makes: float16."""
    return (tiles, in_features // form.group, 2 if form.minimums else 1, TILE)


def pack_groups(rows: Groups, form: GroupForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n, in_features]` as the CPU's kernels read them (csrc/cpu/linear.h).

    Returns the integers, of `packed_shape`, and the scales, of `scales_shape`: views to be copied, not contiguous. The
    last tile is filled up with zeros.
    """
    held = rows.held_as(form)
    if form.bits == 4:
        low, high = held.values.view(torch.uint8).unflatten(1, (-1, 2, WORD)).unbind(2)
        words = (low | high << 4).view(torch.int32)
    else:
        words = held.values.view(DTYPES[form.bits]).unflatten(1, (-1, WORD))
    numbers = [held.scales] if held.minimums is None else [held.scales, held.minimums]
    scales = torch.stack(numbers, 2).to(torch.float16)
    return _tiled(words.squeeze(2) if form.bits == 4 else words, 1), _tiled(scales, 2)


def _tiled(rows: torch.Tensor, place: int) -> torch.Tensor:
    """Rows in tiles: the place of a row in its tile becomes dimension `place` + 1."""
    missing = -len(rows) % TILE
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    return rows.unflatten(0, (-1, TILE)).movedim(1, place + 1)


def dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, form: GroupForm, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` (int64 `[T]`) of the matrix: float32 `[T, in_features]`."""
    tile, place = indices // TILE, indices % TILE
    words, numbers = packed[tile, :, place].contiguous(), scales[tile, :, :, place].float()
    if form.bits == 4:
        both = words.view(torch.uint8).unflatten(1, (-1, 1, WORD))
        words = torch.cat((both & 15, both >> 4), 2)
    values = words.flatten(1).unflatten(1, (-1, form.group)).float() - form.offset
    weights = values * numbers[:, :, :1]
    return (weights - numbers[:, :, 1:] if form.minimums else weights).flatten(1)
