"""The products of adapters, added to those of the weights that they change.

Tokens lie sorted by adapter, and as many programs start as could be needed, as in `grouped_linear`: a graph may hold
them, whichever tokens have which adapter. The first kernel multiplies with the matrices that lead to the ranks, each
part of the channels in a program of its own, so that a few tokens keep a device busy. The second one adds these parts
up, in order, and multiplies with the other matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.grouped_linear import tile_of_group, tiles_of_groups

_CHANNELS, _COLUMNS = 64, 64
_PART, _MOST_PARTS = 1024, 8
"""Channels of a part, and most parts."""
_FEW_TOKENS = 256
"""More have enough tiles without parts, which would take memory."""


@triton.jit
def _shrink_tile(
    sums,
    x,
    down,
    ranks,
    order,
    ends,
    depth,
    part_size,
    ADAPTERS: tl.constexpr,
    ADAPTERS_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    own, first, stop = tile_of_group(ends, tl.program_id(0), ADAPTERS, ADAPTERS_PADDED, ROWS)
    rank, first_rank, part = tl.load(ranks + own), tl.program_id(1) * RANKS, tl.program_id(2)
    if (first < stop) & (first_rank < rank):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        token = tl.load(order + row, mask=row < stop, other=0)
        of_rank = first_rank + tl.arange(0, RANKS)
        total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
        for start in range(part * part_size, tl.minimum(depth, (part + 1) * part_size), CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            rows = tl.load(
                x + token[:, None] * depth + channel[None, :],
                mask=(row < stop)[:, None] & (channel < depth)[None, :],
                other=0.0,
            )
            columns = tl.load(
                down + (own * RANK + of_rank[None, :]) * depth + channel[:, None],
                mask=(of_rank < rank)[None, :] & (channel < depth)[:, None],
                other=0.0,
            )
            total = tl.dot(rows, columns, total, input_precision="ieee")
        places = sums + (row[:, None] * PARTS + part) * RANK + of_rank[None, :]
        tl.store(places, total, mask=(row < stop)[:, None] & (of_rank < rank)[None, :])


@triton.jit
def _expand_tile(
    product,
    sums,
    up,
    ranks,
    order,
    ends,
    height,
    width,
    ADAPTERS: tl.constexpr,
    ADAPTERS_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    own, first, stop = tile_of_group(ends, tl.program_id(0), ADAPTERS, ADAPTERS_PADDED, ROWS)
    rank = tl.load(ranks + own)
    if (first < stop) & (rank > 0):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first_rank in range(0, rank, RANKS):
            of_rank = first_rank + tl.arange(0, RANKS)
            held = (row < stop)[:, None] & (of_rank < rank)[None, :]
            rows = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            for part in tl.static_range(PARTS):
                rows += tl.load(sums + (row[:, None] * PARTS + part) * RANK + of_rank[None, :], mask=held, other=0.0)
            columns = tl.load(
                up + (own * height + column[None, :]) * RANK + of_rank[:, None],
                mask=(column < width)[None, :] & (of_rank < rank)[:, None],
                other=0.0,
            )
            total = tl.dot(rows.to(columns.dtype), columns, total, input_precision="ieee")
        token = tl.load(order + row, mask=row < stop, other=0)
        places = product + token[:, None] * width + column[None, :]
        mask = (row < stop)[:, None] & (column < width)[None, :]
        total += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, total.to(product.dtype.element_ty), mask=mask)


def add_low_rank(
    product: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    ranks: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Add to contiguous `product` `[T, columns]` those of contiguous x `[T, in_features]` with both matrices of each
    token's adapter.

    down: `[adapters, rank, in_features]`. up: `[adapters, >= columns, rank]`. ranks: int32 `[adapters]`, of which each
    has so many; 0: it changes nothing. order: int64 `[T]`, the tokens sorted by adapter, those without one at the end.
    ends: int64 `[adapters]`, where in `order` the tokens of each end.
    """
    (num_tokens, depth), width = x.shape, product.shape[1]
    adapters, rank = down.shape[:2]
    rows, tiles = tiles_of_groups(num_tokens, adapters)
    of_ranks = min(64, max(16, triton.next_power_of_2(rank)))
    parts = min(_MOST_PARTS, triton.cdiv(depth, _PART)) if num_tokens <= _FEW_TOKENS else 1
    part_size = triton.cdiv(triton.cdiv(depth, parts), _CHANNELS) * _CHANNELS
    sums = torch.empty(num_tokens, parts, rank, dtype=torch.float32, device=x.device)
    shape = {
        "ADAPTERS": adapters,
        "ADAPTERS_PADDED": triton.next_power_of_2(adapters),
        "RANK": rank,
        "PARTS": parts,
        "ROWS": rows,
        "num_warps": 4,
    }
    _shrink_tile[(tiles, triton.cdiv(rank, of_ranks), parts)](
        sums, x, down, ranks, order, ends, depth, part_size, RANKS=of_ranks, CHANNELS=_CHANNELS, **shape
    )
    _expand_tile[(tiles, triton.cdiv(width, _COLUMNS))](
        product, sums, up, ranks, order, ends, up.shape[1], width, RANKS=32, COLUMNS=_COLUMNS, **shape
    )
