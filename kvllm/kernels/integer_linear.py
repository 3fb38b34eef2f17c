"""Products of rows with a matrix of integers in groups, or with the matrices of their experts.

A program reads integers, makes numbers of the rows' dtype of them, and multiplies those. With few rows there are few
tiles, so the channels are shared out among programs, too, and a second kernel adds these parts up, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.grouped_linear import tile_of_group, tiles_of_groups

HALF = 64
"""Channels of a row whose numbers of 4 bits are the low halves of as many bytes; those after them are the high ones."""
_FEW_ROWS = 64
"""Most rows, of a matrix without experts, whose channels are shared out."""
_PROGRAMS = 512
"""Programs that keep a device busy."""
_MOST_PARTS = 8
_SUMMED = 1024


@triton.jit
def _numbers(
    integers,
    scales,
    shifts,
    begin,
    depth,
    place,
    has_column,
    group_stride,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    HALF: tl.constexpr,
):
    """float32 `[HALF, columns]`: integers of channels from `begin` on times the scales of their groups, plus shifts."""
    PARTS: tl.constexpr = HALF // GROUP if GROUP % HALF else HALF // HALF  # GROUP is 0 where a row has one alone
    group = (begin // GROUP if GROUP else 0) + tl.arange(0, PARTS)
    places = group[:, None] * group_stride + place[None, :]
    mask = has_column[None, :] & ((group * GROUP)[:, None] < depth)
    scale = tl.load(scales + places, mask=mask, other=0.0).to(tl.float32)
    numbers = tl.reshape(integers.to(tl.float32), [PARTS, HALF // PARTS, integers.shape[1]]) * scale[:, None, :]
    if SHIFTED:
        numbers += tl.load(shifts + places, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    return tl.reshape(numbers, [HALF, integers.shape[1]])


@triton.jit(do_not_specialize=["num_rows", "part_size"])
def _multiply_integers(
    output,
    x,
    codes,
    scales,
    shifts,
    bias,
    ends,
    num_rows,
    depth,
    width,
    expert_stride,
    group_stride,
    part_size,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
):
    part = tl.program_id(2)
    if EXPERTS:
        own, first, stop = tile_of_group(ends, tl.program_id(0), EXPERTS, EXPERTS_PADDED, ROWS)
    else:
        own, first, stop = tl.full((), 0, tl.int64), tl.program_id(0) * ROWS, num_rows
    if first < stop:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_column = column < width
        place = own * expert_stride + column
        code_stride = tl.cdiv(depth, 2 * HALF) * HALF if BITS == 4 else depth
        line = codes + (place * code_stride)[None, :]
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(part * part_size, tl.minimum(depth, (part + 1) * part_size), 2 * HALF):
            inside = tl.arange(0, HALF)
            if BITS == 4:
                both = tl.load(line + (start // 2 + inside)[:, None], mask=has_column[None, :], other=0)
            for half in tl.static_range(2):
                begin = start + half * HALF
                channel = begin + inside
                if BITS == 4:
                    integers = (both >> (4 * half) & 15).to(tl.int32)
                    if not SHIFTED:
                        integers -= 8
                else:
                    exists = has_column[None, :] & (channel < depth)[:, None]
                    integers = tl.load(line + channel[:, None], mask=exists, other=0)
                numbers = _numbers(
                    integers, scales, shifts, begin, depth, place, has_column, group_stride, GROUP, SHIFTED, HALF
                )
                mask = (row < stop)[:, None] & (channel < depth)[None, :]
                rows = tl.load(x + row[:, None] * depth + channel[None, :], mask=mask, other=0.0)
                sums = tl.dot(rows, numbers.to(rows.dtype), sums, input_precision="ieee")
        if BIAS:
            added = tl.load(bias + own * width + column, mask=has_column & (part == 0), other=0.0)
            sums += added.to(tl.float32)[None, :]
        places = (part * num_rows + row)[:, None] * width + column[None, :]
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=(row < stop)[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows", "parts"])
def _add_parts(output, sums, num_rows, width, parts, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * num_rows + row) * width + column, mask=column < width, other=0.0)
    tl.store(output + row * width + column, total.to(output.dtype.element_ty), mask=column < width)


def integer_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shifts: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    width: int,
    experts: tuple[int, int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Contiguous `[rows, in_features]` -> `[rows, width]`.

    codes, scales, shifts: of a QuantizedMatrix, whose first `width` rows are multiplied. group: channels that share a
    scale: a multiple of HALF, a divisor of it, or all. bias: `[width]`.
    experts: how many, the rows from the beginning of one's matrix to that of the next, and int64 `[experts]`, where the
        rows of x, sorted by expert, end for each. bias is `[experts, width]` then.
    """
    num_rows, depth = x.shape
    count, stride, ends = experts or (0, 0, x)
    if count:
        rows, tiles = tiles_of_groups(num_rows, count)
    else:
        rows = 16 if num_rows <= 16 else 64 if num_rows <= _FEW_ROWS else 128
        tiles = triton.cdiv(num_rows, rows)
    columns = 32 if rows == 16 else 64
    of_columns, whole = triton.cdiv(width, columns), triton.cdiv(depth, 2 * HALF)
    few = not count and num_rows <= _FEW_ROWS
    parts = min(_MOST_PARTS, whole, triton.cdiv(_PROGRAMS, of_columns)) if few else 1
    output = x.new_empty(num_rows, width)
    sums = x.new_empty(parts, num_rows, width, dtype=torch.float32) if parts > 1 else output
    _multiply_integers[(tiles, of_columns, parts)](
        sums,
        x,
        codes,
        scales,
        scales if shifts is None else shifts,
        x if bias is None else bias,
        ends,
        num_rows,
        depth,
        width,
        stride,
        scales.stride(0),
        triton.cdiv(whole, parts) * 2 * HALF,
        EXPERTS=count,
        EXPERTS_PADDED=triton.next_power_of_2(max(1, count)),
        BITS=4 if codes.dtype == torch.uint8 else 8,
        GROUP=0 if group >= depth else group,
        SHIFTED=shifts is not None,
        BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        HALF=HALF,
        num_warps=4 if rows == 16 else 8,
        num_stages=4 if rows == 16 else 3,
    )
    if parts > 1:
        _add_parts[(num_rows, triton.cdiv(width, _SUMMED))](output, sums, num_rows, width, parts, COLUMNS=_SUMMED)
    return output
