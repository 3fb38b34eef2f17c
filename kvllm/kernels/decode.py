"""Attention of sequences with one query token over their paged caches; programs share out the segments of KV pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kvllm.kernels.layer_inputs import LayerInputs
from kvllm.kernels.layer_shape import SEGMENT, constexpr_shape, segments
from kvllm.kernels.observed_scores import KeptScores
from kvllm.kernels.tiles import (
    add_sinks,
    attend_tile,
    decode_rows,
    empty_softmax,
    evicted_range,
    kv_pairs_per_tile,
    load_vectors,
    merge,
    stages,
    store_vectors,
    warps,
)

# Programs that are launched for a batch: many times what any device runs at once, so that it stays evenly busy to the
# end. Each has as many of all sequences' segments as any other, or one less.
_PROGRAMS = 4096
# Segments whose partials are read at a time, and query heads and channels of a program that does.
_MERGED = 4
_MERGED_ROWS = 16
_MERGED_CHANNELS = 256


@dataclass(frozen=True)
class Partials:
    """Softmax over each segment, before they are merged; one allocation serves all layers of a step.

    weighted: float32 `[S, query_heads, segments, head_dim]`; maximum, total: float32 `[S, query_heads, segments]`.
    first_segments: int32 `[S + 1]`, segments of all sequences before one, those of single query tokens.
    sequences: int32 `[S * segments]`, the sequence of each of these segments.
    """

    weighted: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor
    first_segments: torch.Tensor
    sequences: torch.Tensor

    @staticmethod
    def of(
        query_start_loc: torch.Tensor,
        last_kv_index: torch.Tensor,
        num_heads: int,
        max_kv_pairs: int,
        head_dim: int,
        group: int,
    ) -> Partials:
        """For a batch, with room for `max_kv_pairs` of a sequence; the first two as in AttentionBatch. group: query
        heads of a KV head."""
        num_sequences, (segment, most) = len(query_start_loc) - 1, segments(group)
        size = (num_sequences, num_heads, min(most, triton.cdiv(max_kv_pairs, segment)))
        weighted, maximum, total = (
            torch.empty(shape, dtype=torch.float32, device=query_start_loc.device)
            for shape in ((*size, head_dim), size, size)
        )
        first_segments = torch.empty_like(query_start_loc)
        sequences = first_segments.new_empty(size[0] * size[2])
        _count_segments[(1,)](
            first_segments,
            sequences,
            query_start_loc,
            last_kv_index,
            num_sequences,
            segment,
            most,
            TILE=256,
            num_warps=4,
        )
        return Partials(weighted, maximum, total, first_segments, sequences)


@dataclass(frozen=True)
class Observed:
    """Scores and sums that all probabilities follow from, for the attention mass; one allocation serves all layers.

    scores: float32 `[S, query_heads, KV pairs]` of sequences with one token, times the scale, in base 2.
    totals: float32 `[T, query_heads]`, the logarithm in base 2 of the sum of the powers of a query token's scores.
    """

    scores: torch.Tensor
    totals: torch.Tensor

    @staticmethod
    def allocate(partials: Partials, num_tokens: int, max_kv_pairs: int) -> Observed:
        num_sequences, num_heads, _ = partials.total.shape
        return Observed(
            partials.total.new_empty(num_sequences, num_heads, triton.cdiv(max_kv_pairs, SEGMENT) * SEGMENT),
            partials.total.new_empty(num_tokens, num_heads),
        )


@triton.jit
def _decode_length(last_kv_index, token, packed_len, head_lengths, sequence, head, SHAPE: constexpr_shape):
    """KV pairs that a query token attends in a head, and the range of indices that were evicted from this head."""
    length = tl.load(last_kv_index + token) + 1
    if SHAPE.ragged:
        evicted_begin, num_evicted = evicted_range(packed_len, head_lengths, sequence, head, SHAPE.kv_heads)
    else:
        evicted_begin, num_evicted = length, 0
    return length - num_evicted, evicted_begin, num_evicted


@triton.jit
def _oldest(length, SHAPE: constexpr_shape):
    """The first KV pair that a query token attends."""
    return tl.maximum(0, length - SHAPE.window) if SHAPE.window else 0


@triton.jit
def _segment_size(length, SEGMENT: tl.constexpr, MAX_SEGMENTS: tl.constexpr):
    """KV pairs of a segment of a sequence with `length` of them, evicted ones included."""
    return SEGMENT * tl.cdiv(length, SEGMENT * MAX_SEGMENTS)


@triton.jit(do_not_specialize=["num_sequences"])
def _count_segments(
    first_segments,
    sequences,
    query_start_loc,
    last_kv_index,
    num_sequences,
    SEGMENT: tl.constexpr,
    MAX_SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A single program for the whole batch."""
    passed = tl.full((), 0, tl.int32)
    for begin in range(0, num_sequences, TILE):
        sequence = begin + tl.arange(0, TILE)
        exists = sequence < num_sequences
        token = tl.load(query_start_loc + sequence, mask=exists, other=0)
        end_token = tl.load(query_start_loc + sequence + 1, mask=exists, other=0)
        single = exists & (end_token - token == 1)  # the prefill kernel attends others
        length = tl.load(last_kv_index + token, mask=single, other=0) + 1
        count = tl.where(single, tl.cdiv(length, _segment_size(length, SEGMENT, MAX_SEGMENTS)), 0)
        first = passed + tl.cumsum(count, 0) - count
        tl.store(first_segments + sequence, first, mask=exists)
        for segment in range(tl.max(count, 0)):
            tl.store(sequences + first + segment, sequence, mask=segment < count)
        passed += tl.sum(count, 0)
    tl.store(first_segments + num_sequences, passed)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "num_segments", "observed_width"],
    do_not_specialize_on_alignment=["head_lengths"],  # a layer's begin where the number of sequences has them begin
)
def _attend_segments(
    queries,
    keys,
    values,
    query_start_loc,
    last_kv_index,
    tables,
    packed_len,
    head_lengths,
    scale,
    partial_weighted,
    partial_maximum,
    partial_total,
    first_segments,
    sequences,
    observed_scores,
    scored_from,
    query_stride,
    num_sequences,
    table_stride,
    num_segments,
    observed_width,
    SHAPE: constexpr_shape,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    OBSERVED: tl.constexpr,
    SCORED: tl.constexpr,
):
    PARTS: tl.constexpr = (SHAPE.group + ROWS - 1) // ROWS
    # Those that read the same KV pairs for other query heads run beside each other.
    program, head = tl.program_id(0) // PARTS, tl.program_id(1)
    num_programs = tl.num_programs(0) // PARTS
    member = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    query_head, has_head = head * SHAPE.group + member, member < SHAPE.group
    all_segments = tl.load(first_segments + num_sequences).to(tl.int64)
    first = (program * all_segments // num_programs).to(tl.int32)
    end = ((program + 1) * all_segments // num_programs).to(tl.int32)
    for of_all in range(first, end):
        sequence = tl.load(sequences + of_all)
        segment = of_all - tl.load(first_segments + sequence)
        token = tl.load(query_start_loc + sequence)
        length, evicted_begin, num_evicted = _decode_length(
            last_kv_index, token, packed_len, head_lengths, sequence, head, SHAPE
        )
        size = _segment_size(length + num_evicted, SHAPE.segment, SHAPE.max_segments)
        query_offsets = token.to(tl.int64) * query_stride + query_head * SHAPE.head_dim
        query = load_vectors(queries, (query_offsets, query_offsets), has_head, queries.dtype.element_ty, SHAPE)
        table = tables + tl.cast(sequence, tl.int64) * table_stride
        first_row = tl.cast(sequence, tl.int64) * (SHAPE.kv_heads * SHAPE.group) + query_head
        observed_begin = 0  # the first KV pair whose score is wanted
        if SCORED:
            observed_begin = tl.load(scored_from + sequence)
        oldest = _oldest(length, SHAPE)
        pairs = (keys, values, table, head, evicted_begin, num_evicted)
        softmax = empty_softmax(ROWS, SHAPE)
        begin = segment * size
        for start in range(tl.maximum(begin, oldest // TILE * TILE), tl.minimum(begin + size, length), TILE):
            kv_index = start + tl.arange(0, TILE)
            exists = kv_index < length
            if SHAPE.window:
                exists = exists & (kv_index >= oldest)
            scores, softmax = attend_tile(query, pairs, kv_index, exists, exists[None, :], scale, softmax, SHAPE)
            if OBSERVED:
                observed = (first_row * observed_width)[:, None] + (kv_index - observed_begin)[None, :]
                wanted = exists & (kv_index >= observed_begin)
                tl.store(observed_scores + observed, scores, mask=has_head[:, None] & wanted[None, :])
        maximum, total, weighted = softmax
        partial = first_row * num_segments + segment
        tl.store(partial_maximum + partial, maximum, mask=has_head)
        tl.store(partial_total + partial, total, mask=has_head)
        store_vectors(partial_weighted, partial * SHAPE.head_dim, has_head, weighted, SHAPE)


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["head_lengths"])
def _merge_segments(
    output,
    query_start_loc,
    last_kv_index,
    packed_len,
    head_lengths,
    partial_weighted,
    partial_maximum,
    partial_total,
    observed_totals,
    sinks,
    num_segments,
    SHAPE: constexpr_shape,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    OBSERVED: tl.constexpr,
    SINKS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """A program for some query heads and channels."""
    PARTS: tl.constexpr = (SHAPE.group + ROWS - 1) // ROWS
    sequence, head = tl.program_id(0), tl.program_id(1) // PARTS
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    length, _, num_evicted = _decode_length(last_kv_index, token, packed_len, head_lengths, sequence, head, SHAPE)
    size = _segment_size(length + num_evicted, SHAPE.segment, SHAPE.max_segments)

    member = tl.program_id(1) % PARTS * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    query_head = head * SHAPE.group + member
    exists = member < SHAPE.group
    mask = exists[:, None] & (channel < SHAPE.head_dim)[None, :]
    maximum = tl.where(exists, float("-inf"), 0.0)  # rows without a query head have seen something: no NaN
    total = tl.where(exists, 0.0, 1.0)
    weighted = tl.zeros([ROWS, CHANNELS], tl.float32)
    first_partial = (sequence.to(tl.int64) * (SHAPE.kv_heads * SHAPE.group) + query_head) * num_segments
    used_segments = tl.cdiv(length, size)
    for first_segment in range(_oldest(length, SHAPE) // size, used_segments, MERGED):
        for i in tl.static_range(MERGED):  # their reads need not wait for each other
            used = exists & (first_segment + i < used_segments)
            partial = first_partial + first_segment + i
            later_maximum = tl.load(partial_maximum + partial, mask=used, other=float("-inf"))
            later_total = tl.load(partial_total + partial, mask=used, other=0.0)
            partial_offsets = partial[:, None] * SHAPE.head_dim + channel[None, :]
            later_weighted = tl.load(partial_weighted + partial_offsets, mask=mask & used[:, None], other=0.0)
            maximum, total, shrink, later_shrink = merge(maximum, total, later_maximum, later_total)
            weighted = weighted * shrink[:, None] + later_weighted * later_shrink[:, None]
    if SINKS:
        maximum, total, shrink = add_sinks(maximum, total, sinks, query_head, exists)
        weighted *= shrink[:, None]

    output_row = token.to(tl.int64) * (SHAPE.kv_heads * SHAPE.group) + query_head
    if OBSERVED:
        tl.store(observed_totals + output_row, maximum + tl.log2(total), mask=exists)
    offsets = output_row[:, None] * SHAPE.head_dim + channel[None, :]
    tl.store(output + offsets, (weighted / total[:, None]).to(output.dtype.element_ty), mask=mask)


def paged_decode(
    inputs: LayerInputs, partials: Partials, observed: Observed | None, kept: KeptScores | None, output: torch.Tensor
) -> None:
    """Attention of the sequences that have exactly one query token; those of others are left alone in `output`.

    observed: where scores and totals are written, if they are wanted. KV pairs are counted without evicted ones.
    kept: where scores are written, if these are wanted; not beside `observed`.
    output: contiguous, the shape and dtype of the queries.

    Source: Flash-Decoding (Dao et al., 2023) over block tables, the query heads of a KV head in one tile.
    """
    queries, sinks, shape = inputs.queries, inputs.sinks, inputs.shape
    head_dim, group = shape.head_dim, shape.group
    quantized = inputs.keys.dtype != queries.dtype
    if quantized:
        shape = replace(shape, shared=False)  # what codes are decoded to would not stay in registers
    rows = decode_rows(group, queries.dtype, head_dim, quantized=quantized)
    parts, merged_parts = triton.cdiv(group, rows), triton.cdiv(group, _MERGED_ROWS)
    merged_channels = min(_MERGED_CHANNELS, shape.channels)
    num_sequences, num_segments = inputs.query_start_loc.shape[0] - 1, partials.total.shape[2]
    wanted = observed or kept
    scores = wanted.scores if wanted else partials.total
    num_warps = warps(queries.dtype, rows, head_dim)
    programs = min(num_sequences * num_segments, triton.cdiv(_PROGRAMS, shape.kv_heads * parts))
    _attend_segments[(programs * parts, shape.kv_heads)](
        queries,
        inputs.keys,
        inputs.values,
        inputs.query_start_loc,
        inputs.last_kv_index,
        inputs.block_tables,
        *inputs.lengths,
        inputs.base_2_scale,
        partials.weighted,
        partials.maximum,
        partials.total,
        partials.first_segments,
        partials.sequences,
        scores,
        kept.scored_from if kept else inputs.last_kv_index,
        queries.stride(0),
        num_sequences,
        inputs.block_tables.stride(0),
        num_segments,
        scores.shape[2],
        SHAPE=shape,
        ROWS=rows,
        TILE=kv_pairs_per_tile(queries.dtype, head_dim, quantized=quantized),
        OBSERVED=scores is not partials.total,
        SCORED=kept is not None,
        num_stages=stages(queries.dtype, head_dim, shared=inputs.shared, quantized=quantized),
        num_warps=num_warps,
    )
    _merge_segments[(num_sequences, shape.kv_heads * merged_parts, triton.cdiv(head_dim, merged_channels))](
        output,
        inputs.query_start_loc,
        inputs.last_kv_index,
        *inputs.lengths,
        partials.weighted,
        partials.maximum,
        partials.total,
        observed.totals if observed else partials.total,
        partials.total if sinks is None else sinks,
        num_segments,
        SHAPE=shape,
        CHANNELS=merged_channels,
        ROWS=_MERGED_ROWS,
        OBSERVED=observed is not None,
        SINKS=sinks is not None,
        MERGED=_MERGED,
        num_warps=num_warps,
    )
