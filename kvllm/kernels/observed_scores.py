"""Scores of KV pairs that are added up while queries pass by (see `kvllm.attention.base.AttentionBatch`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvllm.kernels.layer_inputs import LayerInputs


@dataclass(frozen=True)
class KeptScores:
    """Scores that a query token gives the KV pairs of its sequence; one allocation serves all layers.

    scores: float32 `[S, query_heads, pairs]` of sequences with one token, times the scale, in base 2; the first is that
        of the first pair that is scored. As wide as the longest block table. scored_from: as in AttentionBatch.
    """

    scores: torch.Tensor
    scored_from: torch.Tensor


@triton.jit(do_not_specialize=["table_stride", "kept_width"])
def _add_squares(
    scores,
    kept,
    query_start_loc,
    last_kv_index,
    tables,
    scored_from,
    sinks,
    table_stride,
    kept_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """A program for each sequence and KV head: the squares of the softmax of each row of `kept`. With SINKS, a score of
    each query head takes part in it."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    index, begin = tl.load(last_kv_index + token), tl.load(scored_from + sequence)
    if begin > index:
        return
    count = index - begin + 1
    member = tl.arange(0, ROWS) < GROUP
    query_head = head * GROUP + tl.arange(0, ROWS)
    rows = kept + ((sequence * (KV_HEADS * GROUP) + query_head) * kept_width)[:, None]
    table = tables + sequence * table_stride
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        maximum = tl.load(sinks + query_head, mask=member, other=float("-inf")) * 1.4426950408889634
        total = tl.where(member, 1.0, 0.0)
    for start in range(0, count, TILE):
        pair = start + tl.arange(0, TILE)
        tile = tl.load(rows + pair[None, :], mask=member[:, None] & (pair < count)[None, :], other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(tile, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row without a query head
        total = total * tl.exp2(maximum - shift) + tl.sum(tl.exp2(tile - shift[:, None]), 1)
        maximum = new_maximum
    shift = tl.where(member, maximum, 0.0)
    total = tl.where(member, total, 1.0)
    for start in range(0, count, TILE):
        pair = start + tl.arange(0, TILE)
        exists = pair < count
        tile = tl.load(rows + pair[None, :], mask=member[:, None] & exists[None, :], other=float("-inf"))
        probability = tl.exp2(tile - shift[:, None]) / total[:, None]
        blocks = tl.load(table + (begin + pair) // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        offsets = (blocks * KV_HEADS + head) * BLOCK_SIZE + (begin + pair) % BLOCK_SIZE
        before = tl.load(scores + offsets, mask=exists & (begin + pair != index), other=0.0)
        tl.store(scores + offsets, before + tl.sum(probability * probability, 0), mask=exists)


def add_squares(inputs: LayerInputs, kept: KeptScores, scores: torch.Tensor) -> None:
    """Add what sequences with one query token give the KV pairs that are scored.

    kept: as `paged_decode` left it for this layer. scores: of this layer, contiguous float32
        `[blocks, kv_heads, block_size]`.
    """
    sinks, group = inputs.sinks, inputs.shape.group
    rows = triton.next_power_of_2(group)
    _, kv_heads, block_size = scores.shape
    _add_squares[(kept.scores.shape[0], kv_heads)](
        scores,
        kept.scores,
        inputs.query_start_loc,
        inputs.last_kv_index,
        inputs.block_tables,
        kept.scored_from,
        kept.scores if sinks is None else sinks,
        inputs.block_tables.stride(0),
        kept.scores.shape[2],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TILE=max(16, 128 * 16 // max(16, rows)),
        SINKS=sinks is not None,
        num_warps=4,
    )
