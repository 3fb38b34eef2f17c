"""Attention mass: the probabilities of a step, added to what the KV pairs have received so far (H2O)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.decode import Observed
from kvllm.kernels.layer_inputs import LayerInputs
from kvllm.kernels.layer_shape import constexpr_shape
from kvllm.kernels.tiles import bounded, kv_offsets, load_vectors, products

# Programs for each KV head of a sequence, at most.
_PROGRAMS = 32


@triton.jit(do_not_specialize=["max_scores", "max_kv_pairs"])
def _add_of_decodes(
    mass,
    scores,
    totals,
    query_start_loc,
    last_kv_index,
    table_slots,
    max_scores,
    max_kv_pairs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sequences with one query token: their scores are there already."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start_loc + sequence).to(tl.int64)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    length = tl.load(last_kv_index + token) + 1
    query_head = head * GROUP + tl.arange(0, ROWS)
    member = tl.arange(0, ROWS) < GROUP
    total = tl.load(totals + token * (KV_HEADS * GROUP) + query_head, mask=member, other=0.0)
    scores += (sequence * (KV_HEADS * GROUP) + query_head)[:, None] * max_scores
    mass += (tl.load(table_slots + sequence).to(tl.int64) * KV_HEADS + head) * max_kv_pairs
    for begin in range(tl.program_id(2) * TILE, length, tl.num_programs(2) * TILE):
        kv_index = begin + tl.arange(0, TILE)
        exists = kv_index < length
        score = tl.load(scores + kv_index[None, :], mask=member[:, None] & exists[None, :], other=float("-inf"))
        added = tl.sum(tl.exp2(score - total[:, None]), 0)
        tl.store(mass + kv_index, tl.load(mass + kv_index, mask=exists, other=0.0) + added, mask=exists)


@triton.jit(do_not_specialize=["table_stride", "max_kv_pairs"])
def _add_of_chunks(
    mass,
    queries,
    keys,
    totals,
    query_start_loc,
    last_kv_index,
    tables,
    table_slots,
    scale,
    query_stride,
    table_stride,
    max_kv_pairs,
    SHAPE: constexpr_shape,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sequences with several query tokens: the product of queries and keys again, but neither a softmax nor values."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_token, end_token = tl.load(query_start_loc + sequence), tl.load(query_start_loc + sequence + 1)
    if end_token - first_token < 2:
        return
    length = tl.load(last_kv_index + end_token - 1) + 1
    table = tables + sequence * table_stride
    mass += (tl.load(table_slots + sequence).to(tl.int64) * SHAPE.kv_heads + head) * max_kv_pairs
    for begin in range(tl.program_id(2) * TILE, length, tl.num_programs(2) * TILE):
        kv_index = begin + tl.arange(0, TILE)
        exists = kv_index < length
        offsets, _ = kv_offsets((keys, keys, table, head, length, 0), kv_index, exists, SHAPE)
        tile_keys = load_vectors(keys, offsets, exists, queries.dtype.element_ty, SHAPE)
        added = tl.zeros([ROWS, TILE], tl.float32)
        for begin_row in range(0, (end_token - first_token) * SHAPE.group, ROWS):
            token = first_token + (begin_row + tl.arange(0, ROWS)) // SHAPE.group
            query_head = head * SHAPE.group + (begin_row + tl.arange(0, ROWS)) % SHAPE.group
            token_exists = token < end_token
            query_offsets = token.to(tl.int64) * query_stride + query_head * SHAPE.head_dim
            query = load_vectors(queries, (query_offsets, query_offsets), token_exists, queries.dtype.element_ty, SHAPE)
            newest = tl.load(last_kv_index + token, mask=token_exists, other=-1)
            rows = token.to(tl.int64) * (SHAPE.kv_heads * SHAPE.group) + query_head
            total = tl.load(totals + rows, mask=token_exists, other=0.0)
            scores = bounded(products(query, tile_keys, SHAPE) * scale, SHAPE)
            seen = kv_index[None, :] <= newest[:, None]
            added += tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
        tl.store(mass + kv_index, tl.load(mass + kv_index, mask=exists, other=0.0) + tl.sum(added, 0), mask=exists)


def add_mass(inputs: LayerInputs, observed: Observed, mass: torch.Tensor, table_slots: torch.Tensor) -> None:
    """Add to the mass of each KV pair what all query tokens attended to it, summed over the query heads of a KV head.

    observed: as `paged_decode` and `paged_prefill` left it for this layer and for all query tokens, where all heads
        hold the same KV pairs.
    mass: of this layer, contiguous float32 `[table slots, kv_heads, max_kv_pairs]`. table_slots: int32 `[S]`, the slot
        of each sequence, no two the same.

    Source: H2O (Zhang et al., arXiv 2306.14048). The order of a sum depends on the query tokens of its sequence alone.
    """
    queries, shape = inputs.queries, inputs.shape
    kv_heads, rows = shape.kv_heads, triton.next_power_of_2(shape.group)
    num_sequences, max_scores = observed.scores.shape[0], observed.scores.shape[2]
    _add_of_decodes[(num_sequences, kv_heads, min(_PROGRAMS, triton.cdiv(max_scores, 256)))](
        mass,
        observed.scores,
        observed.totals,
        inputs.query_start_loc,
        inputs.last_kv_index,
        table_slots,
        max_scores,
        mass.shape[2],
        KV_HEADS=kv_heads,
        GROUP=shape.group,
        ROWS=rows,
        TILE=max(16, 256 * 16 // max(16, rows)),
        num_warps=4,
    )
    if len(queries) == num_sequences:
        return
    wide = shape.head_dim > 256
    tile = 16 if wide else 32 if queries.dtype == torch.float32 else 64
    _add_of_chunks[(num_sequences, kv_heads, min(_PROGRAMS, triton.cdiv(max_scores, tile)))](
        mass,
        queries,
        inputs.keys,
        observed.totals,
        inputs.query_start_loc,
        inputs.last_kv_index,
        inputs.block_tables,
        table_slots,
        inputs.base_2_scale,
        queries.stride(0),
        inputs.block_tables.stride(0),
        mass.shape[2],
        SHAPE=shape,
        ROWS=tile,
        TILE=tile,
        num_warps=4 if shape.head_dim <= 128 else 8,
        num_stages=2,
    )
