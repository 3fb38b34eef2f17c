"""Attention of sequences with several query tokens over their paged caches: prompt chunks, recomputed queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.decode import Observed
from kvllm.kernels.layer_inputs import LayerInputs
from kvllm.kernels.layer_shape import constexpr_shape
from kvllm.kernels.prefill_tiles import PrefillTiles, attend_16_bits
from kvllm.kernels.tiles import (
    add_sinks,
    attend_tile,
    empty_softmax,
    evicted_range,
    load_vectors,
    merge,
    scaled,
    store_vectors,
)


@triton.jit
def _attend_kv_pairs(
    query, pairs, begin, end, length, scale, SHAPE: constexpr_shape, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Softmax of a tile of queries over KV pairs `begin .. end - 1`; a query attends those below its `length`, and of
    these, with a window, the last ones."""
    softmax = empty_softmax(ROWS, SHAPE)
    for start in range(begin // TILE * TILE, end, TILE):
        kv_index = start + tl.arange(0, TILE)
        exists = (kv_index >= begin) & (kv_index < end) if SHAPE.window else kv_index < end
        visible = kv_index[None, :] < length[:, None]
        if SHAPE.window:
            visible = visible & (kv_index[None, :] >= length[:, None] - SHAPE.window)
        _, softmax = attend_tile(query, pairs, kv_index, exists, visible, scale, softmax, SHAPE)
    return softmax


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["head_lengths"],  # as in a decode
)
def _attend_chunks(
    output,
    queries,
    keys,
    values,
    query_start_loc,
    last_kv_index,
    tables,
    packed_len,
    head_lengths,
    observed_totals,
    sinks,
    tiles,
    scale,
    query_stride,
    table_stride,
    SHAPE: constexpr_shape,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    BOXES: tl.constexpr,
    OBSERVED: tl.constexpr,
    SINKS: tl.constexpr,
):
    PARTS: tl.constexpr = (SHAPE.group + HEADS - 1) // HEADS
    QUERIES: tl.constexpr = ROWS // HEADS
    # One dimension, because in the others a grid has no more than 65,535: of many heads each token is a tile.
    tile, of_tile = tl.program_id(0) // (SHAPE.kv_heads * PARTS), tl.program_id(0) % (SHAPE.kv_heads * PARTS)
    head, part = of_tile // PARTS, of_tile % PARTS
    sequence, begin_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    if sequence < 0:
        return
    end_token = tl.load(query_start_loc + sequence + 1)
    if SHAPE.ragged:
        evicted_begin, num_evicted = evicted_range(packed_len, head_lengths, sequence, head, SHAPE.kv_heads)
    else:
        evicted_begin, num_evicted = 0, 0

    row = tl.arange(0, ROWS)
    token, member = begin_token + row // HEADS, part * HEADS + row % HEADS
    query_head = head * SHAPE.group + member
    exists = (row < QUERIES * HEADS) & (token < end_token)
    if PARTS > 1:
        exists = exists & (member < SHAPE.group)
    query_offsets = token.to(tl.int64) * query_stride + query_head * SHAPE.head_dim
    query = load_vectors(queries, (query_offsets, query_offsets), exists, queries.dtype.element_ty, SHAPE)
    length = tl.load(last_kv_index + token, mask=exists, other=0) + 1 - num_evicted
    end = tl.max(tl.where(exists, length, 0), 0)
    length = tl.where(exists, length, end)  # rows without a query attend something, too: no NaN
    oldest = tl.maximum(0, tl.min(length, 0) - SHAPE.window) if SHAPE.window else 0

    table = tables + tl.cast(sequence, tl.int64) * table_stride
    pairs = (keys, values, table, head, evicted_begin, num_evicted)
    if SEGMENTED:
        maximum, total, weighted = empty_softmax(ROWS, SHAPE)
        for segment in range(oldest // SHAPE.segment * SHAPE.segment, end, SHAPE.segment):
            begin, stop = tl.maximum(segment, oldest), tl.minimum(segment + SHAPE.segment, end)
            later_maximum, later_total, later_weighted = _attend_kv_pairs(
                query, pairs, begin, stop, length, scale, SHAPE, ROWS, TILE
            )
            maximum, total, shrink, later_shrink = merge(maximum, total, later_maximum, later_total)
            weighted, later = scaled(weighted, shrink, SHAPE), scaled(later_weighted, later_shrink, SHAPE)
            weighted = (weighted[0] + later[0], weighted[1] + later[1])
    else:
        maximum, total, weighted = attend_16_bits(query, pairs, oldest, end, length, scale, SHAPE, ROWS, TILE, BOXES)
    if SINKS:
        maximum, total, shrink = add_sinks(maximum, total, sinks, query_head, exists)
        weighted = scaled(weighted, shrink, SHAPE)

    output_row = token.to(tl.int64) * (SHAPE.kv_heads * SHAPE.group) + query_head
    if OBSERVED:
        tl.store(observed_totals + output_row, maximum + tl.log2(total), mask=exists)
    weighted = (weighted[0] / total[:, None], weighted[1] / total[:, None])
    store_vectors(output, output_row * SHAPE.head_dim, exists, weighted, SHAPE)


def paged_prefill(inputs: LayerInputs, tiles: PrefillTiles, observed: Observed | None, output: torch.Tensor) -> None:
    """Attention of the sequences that have two query tokens or more; those of others are left alone in `output`.

    tiles: of the same batch and cache. observed, output: as in `decode.paged_decode`.

    Source: FlashAttention-2 (arXiv 2307.08691) over block tables; the query heads of a KV head share a tile.
    """
    queries, sinks, shape = inputs.queries, inputs.sinks, inputs.shape
    programs = shape.kv_heads * triton.cdiv(shape.group, tiles.heads)
    _attend_chunks[(programs * len(tiles.order),)](
        output,
        queries,
        *tiles.sources(inputs.keys, inputs.values),
        inputs.query_start_loc,
        inputs.last_kv_index,
        inputs.block_tables,
        *inputs.lengths,
        observed.totals if observed else output,
        output if sinks is None else sinks,
        tiles.order,
        inputs.base_2_scale,
        queries.stride(0),
        inputs.block_tables.stride(0),
        SHAPE=shape,
        ROWS=tiles.rows,
        HEADS=tiles.heads,
        TILE=tiles.kv_pairs,
        SEGMENTED=queries.dtype == torch.float32,  # as in a decode
        BOXES=tiles.boxes,
        OBSERVED=observed is not None,
        SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
