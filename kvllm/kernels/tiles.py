"""Parts of the attention kernels: the offset of a KV pair, one tile of online softmax, the merge of two segments.

A query adds up its KV pairs in an order that only their indices fix: tiles of `kv_pairs_per_tile` one after the other
within a segment of SEGMENT pairs (a multiple of that in a decode over more than 16,384), then the segments, ascending.
So its bits do not depend on the rest of a batch. With float32, decode and prefill use tiles of the same shape, and a
query has the same bits in both up to that length; with 16 bits a prefill has larger tiles, and no segments.

The running maximum is in base 2: `scale` includes log2(e). Source: FlashAttention-2 (arXiv 2307.08691), section 3.1,
and Flash-Decoding (Dao et al., 2023) for the segments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.codes import code_offsets, load_codes

SEGMENT = 256
LOG2_E = 1.4426950408889634


def kv_pairs_per_tile(dtype: torch.dtype, head_dim: int) -> int:
    """KV pairs that a program attends at a time: 16 KiB of keys, and as many of values. A divisor of SEGMENT."""
    return min(64, (16 << 10) // (dtype.itemsize * triton.next_power_of_2(head_dim)))


def decode_rows(group: int) -> int:
    """Rows of a tile that holds one query of each of the `group` query heads of a KV head."""
    return max(16, triton.next_power_of_2(group))


def stages(head_dim: int) -> int:
    """Triton's depth of pipelining. Where a tile lies is read from a table first, so it takes 5 to have one tile on its
    way while another is used; with wide heads that is more than the 99 KiB of shared memory that some GPUs have."""
    return 5 if head_dim <= 128 else 4


def warps(dtype: torch.dtype, rows: int, head_dim: int) -> int:
    """Enough that a tile's scores and sums stay in registers."""
    return 8 if rows * max(128, head_dim) > 64 * 128 or (dtype == torch.float32 and head_dim > 64) else 4


@triton.jit
def evicted_range(packed_len, head_lengths, sequence, head, KV_HEADS: tl.constexpr):
    """The first index in a sequence that was evicted from a head and not from others, and how many were."""
    end = tl.load(packed_len + sequence)
    begin = tl.minimum(tl.load(head_lengths + sequence * KV_HEADS + head), end)
    return begin, end - begin


@triton.jit
def kv_offsets(
    keys,
    values,
    table,
    kv_index,
    exists,
    head,
    evicted_begin,
    num_evicted,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Where a head's keys are in a layer, and where its values, each as `load_vectors` takes it; `kv_index` counts KV
    pairs without evicted ones.

    In elements; in a quantized cache, those of codes, and of words.
    """
    cache_index = kv_index + tl.where(kv_index < evicted_begin, 0, num_evicted)
    blocks = tl.load(table + cache_index // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        offsets, words = code_offsets(keys, blocks, cache_index % BLOCK_SIZE, head, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    else:
        offsets = (blocks * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM) + (cache_index % BLOCK_SIZE) * HEAD_DIM
        words = offsets
    if keys.dtype.element_ty == values.dtype.element_ty:
        value_offsets, value_words = offsets, words
    else:
        value_offsets, value_words = code_offsets(
            values, blocks, cache_index % BLOCK_SIZE, head, KV_HEADS, BLOCK_SIZE, HEAD_DIM
        )
    return (offsets, words), (value_offsets, value_words)


@triton.jit
def load_vectors(cache, offsets, exists, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Keys or values at `offsets`, `[pairs, CHANNELS]` of `dtype`.

    Those that do not exist are read as 0: a weight of 0 would not hide a NaN among them.
    """
    elements, words = offsets
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        vectors = load_codes(cache, elements, words, exists, HEAD_DIM, CHANNELS).to(dtype)
    else:
        channel = tl.arange(0, CHANNELS)
        mask = exists[:, None] & (channel < HEAD_DIM)[None, :]
        vectors = tl.load(cache + (elements[:, None] + channel[None, :]), mask=mask, other=0.0)
    return vectors


@triton.jit
def bounded(scores, SOFT_CAP: tl.constexpr):
    """`SOFT_CAP * tanh(scores / SOFT_CAP)`; the scores themselves if it is 0. Both in base 2."""
    if SOFT_CAP != 0:
        power = tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFT_CAP))
        scores = SOFT_CAP - 2.0 * SOFT_CAP / (power + 1.0)  # tanh(x) = 1 - 2 / (e^2x + 1)
    return scores


@triton.jit
def attend_tile(
    queries,
    keys,
    values,
    offsets,
    exists,
    visible,
    scale,
    maximum,
    total,
    weighted,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Add one tile of KV pairs to the softmax of `queries` `[rows, CHANNELS]`.

    offsets: as `kv_offsets` gives them. exists: bool `[pairs]`, what may be read; visible: bool `[rows, pairs]`, what a
    query attends. Returns the scores (float32 `[rows, pairs]`), the new maximum, the sum of weights (both float32
    `[rows]`) and of weighted values (float32 `[rows, CHANNELS]`).
    """
    key_offsets, value_offsets = offsets
    tile_keys = load_vectors(keys, key_offsets, exists, queries.dtype, HEAD_DIM, CHANNELS)
    scores = tl.dot(queries, tl.trans(tile_keys), input_precision="ieee") * scale
    scores = bounded(scores, SOFT_CAP)
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query that has seen nothing yet
    shrink = tl.exp2(maximum - shift)
    weights = tl.exp2(scores - shift[:, None])
    tile_values = load_vectors(values, value_offsets, exists, queries.dtype, HEAD_DIM, CHANNELS)
    weighted = tl.dot(
        weights.to(tile_values.dtype), tile_values, acc=weighted * shrink[:, None], input_precision="ieee"
    )
    return scores, new_maximum, total * shrink + tl.sum(weights, 1), weighted


@triton.jit
def merge(maximum, total, weighted, later_maximum, later_total, later_weighted):
    """The softmax over two segments from those over each, which may be empty (maximum -inf, sums 0)."""
    new_maximum = tl.maximum(maximum, later_maximum)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # both are empty
    shrink = tl.exp2(maximum - shift)
    later_shrink = tl.exp2(later_maximum - shift)
    total = total * shrink + later_total * later_shrink
    weighted = weighted * shrink[:, None] + later_weighted * later_shrink[:, None]
    return new_maximum, total, weighted


@triton.jit
def add_sinks(maximum, total, weighted, sinks, query_head, exists):
    """The softmax with a learned score for each query head, which has no value."""
    sink = tl.load(sinks + query_head, mask=exists, other=float("-inf")) * 1.4426950408889634
    new_maximum = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_maximum)
    return new_maximum, total * shrink + tl.exp2(sink - new_maximum), weighted * shrink[:, None]
