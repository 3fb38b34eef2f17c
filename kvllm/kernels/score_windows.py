"""Scores of KV pairs that are added up while queries pass by (see `kvllm.attention.base.ScoreWindows`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvllm.kernels.layer_inputs import LayerInputs


@dataclass(frozen=True)
class KeptScores:
    """Scores that a query token gives the KV pairs of its windows; one allocation serves all layers.

    scores: float32 `[S, query_heads, size of a window]` of sequences with one token, times the scale, in base 2; the
        first is that of the earliest window's first pair. A window is no longer than the longest block table.
    window_start: as in AttentionBatch. stride, num_scored, squared: as in ScoreWindows.
    """

    scores: torch.Tensor
    window_start: torch.Tensor
    stride: int
    num_scored: int
    squared: bool

    @property
    def overlap(self) -> int:
        """KV pairs that neighbouring windows share."""
        return max(0, self.scores.shape[2] - self.stride)


@triton.jit
def window_of(window_start, sequence, index, STRIDE: tl.constexpr, OVERLAP: tl.constexpr):
    """The beginning of the window that KV pair `index` lies in, and of the earliest one; `index + 1` if in none."""
    first = tl.load(window_start + sequence)
    window = index - (index - first) % STRIDE
    earliest = tl.where((index - window < OVERLAP) & (window > first), window - STRIDE, window)
    return tl.where(index < first, index + 1, window), tl.where(index < first, index + 1, earliest)


@triton.jit
def _add_window(
    scores,
    table,
    kept,
    sink,
    member,
    head,
    begin,
    count,
    index,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SQUARED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the softmax of each row of `kept` over its first `count` scores to those of the pairs from `begin` on. With
    SINKS, `sink` takes part in it, a score of each row in base 2."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        maximum = sink
        total = tl.where(member, 1.0, 0.0)
    for start in range(0, count, TILE):
        pair = start + tl.arange(0, TILE)
        tile = tl.load(kept + pair[None, :], mask=member[:, None] & (pair < count)[None, :], other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(tile, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row without a query head
        total = total * tl.exp2(maximum - shift) + tl.sum(tl.exp2(tile - shift[:, None]), 1)
        maximum = new_maximum
    shift = tl.where(member, maximum, 0.0)
    total = tl.where(member, total, 1.0)
    for start in range(0, count, TILE):
        pair = start + tl.arange(0, TILE)
        exists = pair < count
        tile = tl.load(kept + pair[None, :], mask=member[:, None] & exists[None, :], other=float("-inf"))
        probability = tl.exp2(tile - shift[:, None]) / total[:, None]
        added = tl.sum(probability * probability if SQUARED else probability, 0)
        blocks = tl.load(table + (begin + pair) // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        offsets = (blocks * KV_HEADS + head) * BLOCK_SIZE + (begin + pair) % BLOCK_SIZE
        before = tl.load(scores + offsets, mask=exists & (begin + pair != index), other=0.0)
        tl.store(scores + offsets, before + added, mask=exists)


@triton.jit(do_not_specialize=["table_stride", "kept_width"])
def _add_windows(
    scores,
    kept,
    query_start_loc,
    last_kv_index,
    tables,
    window_start,
    sinks,
    table_stride,
    kept_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
    NUM_SCORED: tl.constexpr,
    SQUARED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """A program for each sequence and KV head."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    index = tl.load(last_kv_index + token)
    window, earliest = window_of(window_start, sequence, index, STRIDE, OVERLAP)
    if window > index:
        return
    member = tl.arange(0, ROWS) < GROUP
    query_head = head * GROUP + tl.arange(0, ROWS)
    rows = kept + ((sequence * (KV_HEADS * GROUP) + query_head) * kept_width)[:, None]
    table = tables + sequence * table_stride
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + query_head, mask=member, other=float("-inf")) * 1.4426950408889634
    for begin in range(earliest, window + 1, STRIDE):  # the window before, where it overlaps, and the last one
        _add_window(
            scores,
            table,
            rows + (begin - earliest),
            sink,
            member,
            head,
            begin,
            tl.minimum(index - begin + 1, NUM_SCORED),
            index,
            KV_HEADS,
            BLOCK_SIZE,
            ROWS,
            TILE,
            SQUARED,
            SINKS,
        )


def add_windows(inputs: LayerInputs, kept: KeptScores, scores: torch.Tensor) -> None:
    """Add what sequences with one query token give the KV pairs of their windows.

    kept: as `paged_decode` left it for this layer. scores: of this layer, contiguous float32
        `[blocks, kv_heads, block_size]`.
    """
    sinks, group = inputs.sinks, inputs.shape["GROUP"]
    rows = triton.next_power_of_2(group)
    _, kv_heads, block_size = scores.shape
    _add_windows[(kept.scores.shape[0], kv_heads)](
        scores,
        kept.scores,
        inputs.query_start_loc,
        inputs.last_kv_index,
        inputs.block_tables,
        kept.window_start,
        kept.scores if sinks is None else sinks,
        inputs.block_tables.stride(0),
        kept.scores.shape[2],
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TILE=max(16, 128 * 16 // max(16, rows)),
        STRIDE=kept.stride,
        OVERLAP=kept.overlap,
        NUM_SCORED=kept.num_scored,
        SQUARED=kept.squared,
        SINKS=sinks is not None,
        num_warps=4,
    )
