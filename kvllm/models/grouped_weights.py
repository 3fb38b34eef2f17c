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
    """Rows `[n, in_features]` as the CPU's kernels read them (csrc/cpu/linear.h).

    Returns the integers, of `packed_shape`, and the scales, of `scales_shape`: views to be copied, not contiguous. The
    last tile is filled up with zeros.
    """
    held = rows.held_as(form)
    words = held.values.view(torch.uint8).unflatten(1, (-1, WORD))
    if form.bits == 4:
        low, high = words.unflatten(1, (-1, 2)).unbind(2)
        words = (low | high << 4).view(torch.int32).squeeze(2)
    elif form.bits == 6:
        first, last = words.unflatten(1, (-1, WORD)).split((3, 1), 2)
        words = (first | last >> torch.tensor([[0], [2], [4]], dtype=torch.uint8) << 6).flatten(1, 2)
    numbers = [held.scales] if held.minimums is None else [held.scales, held.minimums]
    scales = torch.stack(numbers, 2).to(torch.float16)
    return _tiled(words.view(DTYPES[form.bits]), 1), _tiled(scales, 2)


def _tiled(rows: torch.Tensor, place: int) -> torch.Tensor:
    """Rows in tiles: the place of a row in its tile becomes dimension `place` + 1."""
    missing = -len(rows) % TILE
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    return rows.unflatten(0, (-1, TILE)).movedim(1, place + 1)
