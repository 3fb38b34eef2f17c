"""Products of rows with the matrices of their experts, all in one launch.

Rows lie sorted by expert. A program multiplies a tile of rows of one expert with a tile of columns of its matrix. How
many tiles an expert has is on the device alone, so as many programs start as could be needed, and find their expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS, _CHANNELS = 64, 64


@triton.jit
def tile_of_group(ends, tile, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """The group whose tile of rows this is, the first of these rows, and where those of the group end: no later than
    the first where there is no such tile."""
    group = tl.arange(0, GROUPS_PADDED)
    end = tl.load(ends + group, mask=group < GROUPS, other=0)
    begin = tl.load(ends + group - 1, mask=(group > 0) & (group < GROUPS), other=0)
    tiles = (tl.maximum(end - begin, 0) + ROWS - 1) // ROWS
    last_tile = tl.cumsum(tiles, 0)
    mine = (group < GROUPS) & (last_tile > tile) & (last_tile - tiles <= tile)
    own = tl.sum(tl.where(mine, group, 0), 0).to(tl.int64)
    first = tl.sum(tl.where(mine, begin + (tile - (last_tile - tiles)) * ROWS, 0), 0)
    return own, first, tl.sum(tl.where(mine, end, 0), 0)


def tiles_of_groups(num_rows: int, num_groups: int) -> tuple[int, int]:
    """Rows of a tile, and most tiles that so many rows of groups can have."""
    rows = 16 if num_rows <= 16 * num_groups else 64
    return rows, min(num_rows, num_groups + num_rows // rows)


@triton.jit
def _multiply_tile(
    output,
    x,
    weight,
    bias,
    ends,
    expert_stride,
    depth,
    width,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
):
    own, first, stop = tile_of_group(ends, tl.program_id(0), EXPERTS, EXPERTS_PADDED, ROWS)
    if first < stop:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        channel = tl.arange(0, CHANNELS)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        matrix = weight + own * expert_stride
        for start in range(0, depth, CHANNELS):
            inside = start + channel < depth
            rows = tl.load(
                x + row[:, None] * depth + start + channel[None, :],
                mask=(row[:, None] < stop) & inside[None, :],
                other=0.0,
            )
            columns = tl.load(
                matrix + column[None, :].to(tl.int64) * depth + start + channel[:, None],
                mask=(column[None, :] < width) & inside[:, None],
                other=0.0,
            )
            sums = tl.dot(rows, columns, sums, input_precision="ieee")
        if BIAS:
            sums += tl.load(bias + own * width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        tl.store(
            output + row[:, None] * width + column[None, :],
            sums.to(output.dtype.element_ty),
            mask=(row[:, None] < stop) & (column[None, :] < width),
        )


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Contiguous `[rows, in_features]`, sorted by expert -> `[rows, out_features]`.

    weight: `[experts, out_features, in_features]`, of which the matrices are dense. bias: `[experts, out_features]`, or
    None. ends: int64 `[experts]`, where the rows of each expert end.
    """
    num_rows, depth = x.shape
    num_experts, width = weight.shape[:2]
    output = x.new_empty(num_rows, width)
    rows, most_tiles = tiles_of_groups(num_rows, num_experts)
    _multiply_tile[(most_tiles, triton.cdiv(width, _COLUMNS))](
        output,
        x,
        weight,
        x if bias is None else bias,
        ends,
        weight.stride(0),
        depth,
        width,
        EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        ROWS=rows,
        COLUMNS=_COLUMNS,
        CHANNELS=_CHANNELS,
        BIAS=bias is not None,
        num_warps=4,
    )
    return output
