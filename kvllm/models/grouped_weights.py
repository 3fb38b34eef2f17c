"""Matrices of integers with a scale for each group of 16 or 32 weights, in the order in which the CPU reads them."""

from __future__ import annotations

import torch

from kvllm.files.groups import GroupForm, Groups
from kvllm.models.quantize import TILE, WORD

DTYPES = {4: torch.int32, 6: torch.uint8, 8: torch.int8}
"""Of packed integers, by their bits."""


def packed_shape(tiles: int, in_features: int, form: GroupForm) -> tuple[int, ...]:
    """Of the integers that `pack_groups` makes, which have a dtype of DTYPES."""
    words = in_features * form.bits // (8 * WORD)
    return (tiles, words, TILE) if form.bits == 4 else (tiles, words, TILE, WORD)


def scales_shape(tiles: int, in_features: int, form: GroupForm) -> tuple[int, ...]:
    """Of the scales, and minimums, that `pack_groups` makes: float16."""
    return (tiles, in_features // form.group, 2 if form.minimums else 1, TILE)


def pack_groups(rows: Groups, form: GroupForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n, in_features]` as the CPU's kernels read them (csrc/cpu/linear.h), before they are put into tiles.

    Returns integers: int32 `[n, words]`. scales: float16 `[n, numbers]`, the scale of each group, and its minimum.
    """
    held = rows.held_as(form)
    words = held.values.contiguous().view(torch.int32)  # four integers each
    if form.bits == 4:
        low, high = words.unflatten(1, (-1, 2)).unbind(2)
        words = low | high << 4
    elif form.bits == 6:
        first, last = words.unflatten(1, (-1, 4)).split((3, 1), 2)
        words = (first | (last >> torch.tensor([0, 2, 4], dtype=torch.int32) & 0x03030303) << 6).flatten(1)
    numbers = [held.scales] if held.minimums is None else [held.scales, held.minimums]
    return words, torch.stack(numbers, 2).flatten(1).to(torch.float16)
