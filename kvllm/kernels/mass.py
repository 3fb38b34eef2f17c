"""Attention mass: the probabilities of a step, added to what the entries have received so far (H2O)."""

# A launch takes options, and constexpr parameters numbers, of which Triton's types say nothing.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.decode import Observed
from kvllm.kernels.tiles import LOG2_E, entry_offsets

# Programs for each KV head of a sequence, at most.
_PROGRAMS = 32


@triton.jit(do_not_specialize=["max_scores", "max_entries"])
def _add_of_one_row(
    mass,
    scores,
    totals,
    query_start_loc,
    last_kv_index,
    table_rows,
    max_scores,
    max_entries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sequences with one row: their scores are there already."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(query_start_loc + sequence).to(tl.int64)
    if tl.load(query_start_loc + sequence + 1) - row != 1:
        return
    length = tl.load(last_kv_index + row) + 1
    query_head = head * GROUP + tl.arange(0, ROWS)
    member = tl.arange(0, ROWS) < GROUP
    total = tl.load(totals + row * (KV_HEADS * GROUP) + query_head, mask=member, other=0.0)
    scores += (sequence * (KV_HEADS * GROUP) + query_head)[:, None] * max_scores
    mass += (tl.load(table_rows + sequence).to(tl.int64) * KV_HEADS + head) * max_entries
    for begin in range(tl.program_id(2) * TILE, length, tl.num_programs(2) * TILE):
        entries = begin + tl.arange(0, TILE)
        exists = entries < length
        score = tl.load(scores + entries[None, :], mask=member[:, None] & exists[None, :], other=float("-inf"))
        added = tl.sum(tl.exp2(score - total[:, None]), 0)
        tl.store(mass + entries, tl.load(mass + entries, mask=exists, other=0.0) + added, mask=exists)


@triton.jit(do_not_specialize=["table_stride", "max_entries"])
def _add_of_rows(
    mass,
    queries,
    keys,
    totals,
    query_start_loc,
    last_kv_index,
    tables,
    table_rows,
    scale,
    query_stride,
    table_stride,
    max_entries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sequences with several rows: the product of queries and keys again, but neither a softmax nor values."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_row, end_row = tl.load(query_start_loc + sequence), tl.load(query_start_loc + sequence + 1)
    if end_row - first_row == 1:
        return
    length = tl.load(last_kv_index + end_row - 1) + 1
    channel = tl.arange(0, CHANNELS)
    table = tables + sequence * table_stride
    mass += (tl.load(table_rows + sequence).to(tl.int64) * KV_HEADS + head) * max_entries
    for begin in range(tl.program_id(2) * TILE, length, tl.num_programs(2) * TILE):
        entries = begin + tl.arange(0, TILE)
        exists = entries < length
        offsets = entry_offsets(table, entries, exists, head, length, 0, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        key_mask = exists[:, None] & (channel < HEAD_DIM)[None, :]
        tile_keys = tl.load(keys + offsets[:, None] + channel[None, :], mask=key_mask, other=0.0)
        added = tl.zeros([ROWS, TILE], tl.float32)
        for place in range(0, (end_row - first_row) * GROUP, ROWS):
            row = first_row + (place + tl.arange(0, ROWS)) // GROUP
            query_head = head * GROUP + (place + tl.arange(0, ROWS)) % GROUP
            row_exists = row < end_row
            query_offsets = row.to(tl.int64) * query_stride + query_head * HEAD_DIM
            query_mask = row_exists[:, None] & (channel < HEAD_DIM)[None, :]
            query = tl.load(queries + query_offsets[:, None] + channel[None, :], mask=query_mask, other=0.0)
            newest = tl.load(last_kv_index + row, mask=row_exists, other=-1)
            total = tl.load(totals + row.to(tl.int64) * (KV_HEADS * GROUP) + query_head, mask=row_exists, other=0.0)
            scores = tl.dot(query, tl.trans(tile_keys), input_precision="ieee") * scale
            seen = entries[None, :] <= newest[:, None]
            added += tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
        tl.store(mass + entries, tl.load(mass + entries, mask=exists, other=0.0) + tl.sum(added, 0), mask=exists)


def add_mass(
    mass: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_start_loc: torch.Tensor,
    last_kv_index: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor,
    scale: float,
    observed: Observed,
) -> None:
    """Add to the mass of each entry what all rows attended to it, summed over the query heads of a KV head.

    mass: of this layer, contiguous float32 `[rows of the table, kv_heads, entries]`. table_rows: int32 `[S]`, the row
        of each sequence, no two the same. observed: as `paged_decode` and `paged_prefill` left it for this layer and
        for all rows, without holes. The other arguments are those of `paged_decode`.

    Source: H2O (Zhang et al., arXiv 2306.14048). The order of a sum depends on the rows of its sequence alone.
    """
    num_rows, num_heads, head_dim = queries.shape
    _, kv_heads, block_size, _ = keys.shape
    group = num_heads // kv_heads
    num_sequences, max_scores = observed.scores.shape[0], observed.scores.shape[2]
    _add_of_one_row[(num_sequences, kv_heads, min(_PROGRAMS, triton.cdiv(max_scores, 256)))](
        mass,
        observed.scores,
        observed.totals,
        query_start_loc,
        last_kv_index,
        table_rows,
        max_scores,
        mass.shape[2],
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=triton.next_power_of_2(group),
        TILE=256,
        num_warps=4,
    )
    if num_rows == num_sequences:
        return
    tile = 32 if queries.dtype == torch.float32 else 64
    _add_of_rows[(num_sequences, kv_heads, min(_PROGRAMS, triton.cdiv(max_scores, tile)))](
        mass,
        queries,
        keys,
        observed.totals,
        query_start_loc,
        last_kv_index,
        block_tables,
        table_rows,
        scale * LOG2_E,
        queries.stride(0),
        block_tables.stride(0),
        mass.shape[2],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        CHANNELS=triton.next_power_of_2(head_dim),
        ROWS=tile,
        TILE=tile,
        num_warps=4,
        num_stages=2,
    )
