"""Parts of the attention kernels: the offset of a KV pair, one tile of online softmax, the merge of two segments.

A query adds up its KV pairs in an order that only their indices fix: tiles of `kv_pairs_per_tile` one after the other
within a segment of SEGMENT pairs (a multiple of that for more than 32 query heads of a KV head, and in a decode over
more than 16,384), then the segments, ascending. So its bits do not depend on the rest of a batch. With float32, decode
and prefill use tiles of the same shape, and a query has the same bits in both up to that length; with 16 bits a prefill
has larger tiles, and no segments.

A tensor has a power of two of channels, so a vector is in two parts, a pair of tensors: up to 512 channels, and the
rest. Heads of no more have no rest, and the second of the pair has no meaning.

The running maximum is in base 2: `scale` includes log2(e). Source: FlashAttention-2 (arXiv 2307.08691), section 3.1,
and Flash-Decoding (Dao et al., 2023) for the segments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.capability import fits_wide_tiles, multiplies_from_memory
from kvllm.kernels.codes import code_offsets, load_codes
from kvllm.kernels.layer_shape import WIDEST, constexpr_shape

LOG2_E = 1.4426950408889634


def kv_pairs_per_tile(dtype: torch.dtype, head_dim: int, *, quantized: bool) -> int:
    """KV pairs that a program attends at a time: 16 KiB of keys, and as many of values; of the widest heads, as few as
    a product may have, or more where they fit. A divisor of SEGMENT."""
    if head_dim > WIDEST and dtype != torch.float32 and not quantized and fits_wide_tiles():
        return 32
    return max(16, min(64, (16 << 10) // (dtype.itemsize * triton.next_power_of_2(head_dim))))


def decode_rows(group: int, dtype: torch.dtype, head_dim: int, *, quantized: bool) -> int:
    """Rows of a tile that holds one query of each of the `group` query heads of a KV head; of the widest heads, of as
    many as registers can hold beside the sums and, in a quantized cache, what codes are decoded to."""
    rows = max(16, triton.next_power_of_2(group))
    if head_dim <= 256:
        return rows
    return min(rows, 16 if quantized or dtype == torch.float32 else 32)


def stages(dtype: torch.dtype, head_dim: int, *, shared: bool, quantized: bool) -> int:
    """Triton's depth of pipelining. Where a tile lies is read from a table first, so it takes 5 to have one tile on its
    way while another is used; with wide heads that is more than the 99 KiB of shared memory that some GPUs have, unless
    values are the keys. The widest heads have less in float32, and where codes take registers."""
    if head_dim <= 256:
        return 5 if head_dim <= 128 else 4
    if quantized or dtype == torch.float32:
        return 3 if quantized or shared else 1
    return 5 if shared or multiplies_from_memory() else 4


def warps(dtype: torch.dtype, rows: int, head_dim: int) -> int:
    """Enough that a tile's scores and sums stay in registers."""
    if head_dim > 256 or (dtype == torch.float32 and head_dim > 64):
        return 8
    return 8 if rows * max(128, head_dim) > 64 * 128 else 4


@triton.jit
def evicted_range(packed_len, head_lengths, sequence, head, KV_HEADS: tl.constexpr):
    """The first index in a sequence that was evicted from a head and not from others, and how many were."""
    end = tl.load(packed_len + sequence)
    begin = tl.minimum(tl.load(head_lengths + sequence * KV_HEADS + head), end)
    return begin, end - begin


@triton.jit
def kv_offsets(pairs, kv_index, exists, SHAPE: constexpr_shape):
    """Where a head's keys are in a layer, and where its values, each as `load_vectors` takes it; `kv_index` counts KV
    pairs without evicted ones.

    pairs: the keys and the values of a layer, the blocks of a sequence, a head, and the first index that was evicted
    from it and how many were. In elements; in a quantized cache, those of codes, and of words.
    """
    keys, values, table, head, evicted_begin, num_evicted = pairs
    cache_index = kv_index + tl.where(kv_index < evicted_begin, 0, num_evicted)
    blocks = tl.load(table + cache_index // SHAPE.block_size, mask=exists, other=0).to(tl.int64)
    slots = cache_index % SHAPE.block_size
    if keys.dtype.element_ty.primitive_bitwidth == 8:
        offsets, words = code_offsets(keys, blocks, slots, head, SHAPE.kv_heads, SHAPE.block_size, SHAPE.head_dim)
    else:
        offsets = (blocks * SHAPE.kv_heads + head) * (SHAPE.block_size * SHAPE.head_dim) + slots * SHAPE.head_dim
        words = offsets
    if keys.dtype.element_ty == values.dtype.element_ty:
        value_offsets, value_words = offsets, words
    else:
        value_offsets, value_words = code_offsets(
            values, blocks, slots, head, SHAPE.kv_heads, SHAPE.block_size, SHAPE.head_dim
        )
    return (offsets, words), (value_offsets, value_words)


@triton.jit
def load_channels(
    vectors,
    offsets,
    exists,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Channels from FIRST on of the keys, values or queries at `offsets`, `[vectors, CHANNELS]` of `dtype`.

    Those that do not exist are read as 0: a weight of 0 would not hide a NaN among them.
    """
    elements, words = offsets
    if vectors.dtype.element_ty.primitive_bitwidth == 8:
        loaded = load_codes(vectors, elements, words, exists, HEAD_DIM, FIRST, CHANNELS).to(dtype)
    else:
        channel = FIRST + tl.arange(0, CHANNELS)
        mask = exists[:, None] & (channel < HEAD_DIM)[None, :]
        loaded = tl.load(vectors + (elements[:, None] + channel[None, :]), mask=mask, other=0.0)
    return loaded


@triton.jit
def load_vectors(vectors, offsets, exists, dtype: tl.constexpr, SHAPE: constexpr_shape):
    """`load_channels` of both parts of vectors."""
    first = load_channels(vectors, offsets, exists, dtype, SHAPE.head_dim, 0, SHAPE.channels)
    rest = first
    if SHAPE.rest:
        rest = load_channels(vectors, offsets, exists, dtype, SHAPE.head_dim, SHAPE.channels, SHAPE.rest)
    return first, rest


@triton.jit
def store_vectors(target, offsets, exists, vectors, SHAPE: constexpr_shape):
    """Write both parts of vectors to the elements from `offsets` on, in the dtype of `target`."""
    channel = tl.arange(0, SHAPE.channels)
    mask = exists[:, None] & (channel < SHAPE.head_dim)[None, :]
    tl.store(target + (offsets[:, None] + channel[None, :]), vectors[0].to(target.dtype.element_ty), mask=mask)
    if SHAPE.rest:
        channel = SHAPE.channels + tl.arange(0, SHAPE.rest)
        mask = exists[:, None] & (channel < SHAPE.head_dim)[None, :]
        tl.store(target + (offsets[:, None] + channel[None, :]), vectors[1].to(target.dtype.element_ty), mask=mask)


@triton.jit
def products(queries, keys, SHAPE: constexpr_shape):
    """Of both parts of queries and of keys, float32 `[rows, pairs]`."""
    scores = tl.dot(queries[0], tl.trans(keys[0]), input_precision="ieee")
    if SHAPE.rest:
        scores = tl.dot(queries[1], tl.trans(keys[1]), acc=scores, input_precision="ieee")
    return scores


@triton.jit
def add_weighted(weighted, shrink, weights, values, SHAPE: constexpr_shape):
    """`weighted * shrink` and the sum of weighted values, in both parts."""
    weights = weights.to(values[0].dtype)
    first = tl.dot(weights, values[0], acc=weighted[0] * shrink[:, None], input_precision="ieee")
    rest = weighted[1]
    if SHAPE.rest:
        rest = tl.dot(weights, values[1], acc=rest * shrink[:, None], input_precision="ieee")
    return first, rest


@triton.jit
def scaled(weighted, factor, SHAPE: constexpr_shape):
    """Both parts of `weighted`, each row times a factor."""
    rest = weighted[1]
    if SHAPE.rest:
        rest = rest * factor[:, None]
    return weighted[0] * factor[:, None], rest


@triton.jit
def empty_softmax(ROWS: tl.constexpr, SHAPE: constexpr_shape):
    """The maximum and the total, float32 `[ROWS]`, and the weighted sum, in both parts, over no KV pair."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.full([ROWS, SHAPE.channels], 0.0, tl.float32)
    return maximum, total, (weighted, tl.full([ROWS, SHAPE.rest if SHAPE.rest else 1], 0.0, tl.float32))


@triton.jit
def bounded(scores, SHAPE: constexpr_shape):
    """`soft_cap * tanh(scores / soft_cap)`; the scores themselves if it is 0. Both in base 2."""
    if SHAPE.soft_cap != 0:
        power = tl.exp2(scores * (2.0 * 1.4426950408889634 / SHAPE.soft_cap))
        scores = SHAPE.soft_cap - 2.0 * SHAPE.soft_cap / (power + 1.0)  # tanh(x) = 1 - 2 / (e^2x + 1)
    return scores


@triton.jit
def attend_tile(queries, pairs, kv_index, exists, visible, scale, softmax, SHAPE: constexpr_shape):
    """Add one tile of KV pairs to the softmax of `queries`, in both parts.

    pairs, kv_index: as `kv_offsets` takes them. exists: bool `[pairs]`, what may be read. visible: bool
    `[rows, pairs]`, what a query attends. softmax: as `empty_softmax` gives it. Returns the scores, float32
    `[rows, pairs]`, and the new softmax.
    """
    maximum, total, weighted = softmax
    key_offsets, value_offsets = kv_offsets(pairs, kv_index, exists, SHAPE)
    tile_keys = load_vectors(pairs[0], key_offsets, exists, queries[0].dtype, SHAPE)
    scores = bounded(products(queries, tile_keys, SHAPE) * scale, SHAPE)
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query that has seen nothing yet
    shrink = tl.exp2(maximum - shift)
    weights = tl.exp2(scores - shift[:, None])
    tile_values = tile_keys
    if not SHAPE.shared:
        tile_values = load_vectors(pairs[1], value_offsets, exists, queries[0].dtype, SHAPE)
    weighted = add_weighted(weighted, shrink, weights, tile_values, SHAPE)
    return scores, (new_maximum, total * shrink + tl.sum(weights, 1), weighted)


@triton.jit
def merge(maximum, total, later_maximum, later_total):
    """The softmax over two segments from those over each, which may be empty (maximum -inf, total 0): its maximum and
    total, and what the weighted sums of the first and of the later are multiplied with."""
    new_maximum = tl.maximum(maximum, later_maximum)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # both are empty
    shrink = tl.exp2(maximum - shift)
    later_shrink = tl.exp2(later_maximum - shift)
    return new_maximum, total * shrink + later_total * later_shrink, shrink, later_shrink


@triton.jit
def add_sinks(maximum, total, sinks, query_head, exists):
    """The maximum and total with a learned score for each query head, which has no value, and what the weighted sum is
    multiplied with."""
    sink = tl.load(sinks + query_head, mask=exists, other=float("-inf")) * 1.4426950408889634
    new_maximum = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - new_maximum)
    return new_maximum, total * shrink + tl.exp2(sink - new_maximum), shrink
