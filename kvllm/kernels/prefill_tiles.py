"""Tiles of a prefill: which query tokens each has, in which order they start, and their loop over KV pairs in 16 bits.

Only tiles at the end of what a query attends, or at the border of a window, are masked. On compute capability 9.0 a
tile of keys is one copy by the tensor memory accelerator (TMA), if a block has room for a whole one.
"""

# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvllm.kernels.capability import has_boxes, multiplies_from_memory
from kvllm.kernels.layer_shape import constexpr_shape
from kvllm.kernels.tiles import (
    add_weighted,
    bounded,
    decode_rows,
    empty_softmax,
    kv_offsets,
    kv_pairs_per_tile,
    load_vectors,
    products,
    stages,
    warps,
)


@dataclass(frozen=True)
class PrefillTiles:
    """How the query tokens of sequences with several are dealt out to programs; the same for all layers.

    order: int32 `[tiles, 2]`, the sequence and the first query token of each tile, those with the most KV pairs first,
        so that no long one is left when the others are done; the sequence is -1 where a tile has none.
    rows: query tokens of a tile times `heads`, filled up. heads: those of a KV head, or a part of them where they are
        many. kv_pairs: attended at a time.
    boxes: whether `kv_pairs` of them are copied at once.
    """

    order: torch.Tensor
    rows: int
    heads: int
    kv_pairs: int
    boxes: bool
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls,
        query_start_loc: torch.Tensor,
        last_kv_index: torch.Tensor,
        keys: torch.Tensor,
        num_query_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        shared: bool,
        ragged: bool,
    ) -> PrefillTiles:
        """For query tokens of `dtype`.

        query_start_loc, last_kv_index: as in AttentionBatch. keys: of any layer, as in `decode.paged_decode`. shared:
        values are the keys. ragged: heads have evicted KV pairs of their own.
        """
        _, kv_heads, block_size, _ = keys.shape
        group, quantized = num_query_heads // kv_heads, keys.dtype != dtype
        kv_pairs = 128 if head_dim <= 128 else 64
        whole = block_size % kv_pairs == 0 and not quantized
        boxes = whole and dtype != torch.float32 and not ragged and head_dim <= 256 and has_boxes()
        rows = _rows(group, dtype, head_dim, quantized=quantized)
        heads = triton.cdiv(group, triton.cdiv(group, rows))
        if boxes:
            num_warps, num_stages = 8, 3  # one tile is used, one is on its way, and where the next lies is read
        else:
            kv_pairs = _kv_pairs(dtype, head_dim, quantized=quantized)
            num_warps = 8 if head_dim > 128 else warps(dtype, rows, head_dim)
            num_stages = stages(dtype, head_dim, shared=shared, quantized=quantized)
        order = longest_first(query_start_loc, last_kv_index, rows // heads)
        return cls(order, rows, heads, kv_pairs, boxes, num_warps, num_stages)

    def sources(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[TensorDescriptor | torch.Tensor, ...]:
        """Keys and values of a layer as the kernel takes them."""
        if not self.boxes:
            return keys, values
        channels = triton.next_power_of_2(keys.shape[-1])
        return tuple(
            TensorDescriptor.from_tensor(each.view(-1, each.shape[-1]), [self.kv_pairs, channels])
            for each in (keys, values)
        )


def _kv_pairs(dtype: torch.dtype, head_dim: int, *, quantized: bool) -> int:
    """As in a decode. Where the operands of products take registers, half as many of 16 bits: the rows of a tile are
    many, and all of them would spill."""
    pairs = kv_pairs_per_tile(dtype, head_dim, quantized=quantized)
    fits = dtype == torch.float32 or head_dim <= 64 or multiplies_from_memory()
    return pairs if fits else max(16, pairs // 2)


def _rows(group: int, dtype: torch.dtype, head_dim: int, *, quantized: bool) -> int:
    """At most 32 KiB of rows. Those of float32 must add up like those of a decode. Decoding wide codes takes registers,
    too."""
    rows = decode_rows(group, dtype, head_dim, quantized=quantized)
    if dtype == torch.float32 or (quantized and head_dim > 256):
        return rows
    if head_dim > 256:
        return 64 if head_dim <= 512 and multiplies_from_memory() else 32
    wide_rows = 32 if quantized and not multiplies_from_memory() else 64
    return max(128 if head_dim <= 128 else wide_rows, rows)


def longest_first(query_start_loc: torch.Tensor, last_kv_index: torch.Tensor, tokens_per_tile: int) -> torch.Tensor:
    """`PrefillTiles.order`, on the device of the arguments (see AttentionBatch).

    Lengths are not known to the host, so tiles are dealt out generously: sequence s has those from
    `query_start_loc[s] // tokens_per_tile + s` on, and some have no query token.
    """
    num_sequences, num_tokens = len(query_start_loc) - 1, len(last_kv_index)
    device = query_start_loc.device
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    first_tiles = starts // tokens_per_tile + torch.arange(num_sequences, dtype=torch.int32, device=device)
    tiles = torch.arange(num_tokens // tokens_per_tile + num_sequences, dtype=torch.int32, device=device)
    sequences = torch.searchsorted(first_tiles, tiles, right=True) - 1
    begins = starts[sequences] + (tiles - first_tiles[sequences]) * tokens_per_tile
    ends, decodes = ends[sequences], ends[sequences] - starts[sequences] == 1
    exists = (begins < ends) & ~decodes  # the decode kernel attends single tokens
    last_tokens = (torch.minimum(begins + tokens_per_tile, ends) - 1).clamp(max=num_tokens - 1)
    lengths = torch.where(exists, last_kv_index[last_tokens], -1)
    order = lengths.argsort(descending=True, stable=True)
    return torch.stack((torch.where(exists, sequences, -1), begins), dim=1)[order].int()


@triton.jit
def _load_tile(
    cache,
    offsets,
    exists,
    dtype: tl.constexpr,
    SHAPE: constexpr_shape,
    BOXES: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Both parts of keys or of values; if CLEARED, those that do not exist are 0. BOXES have one part."""
    if BOXES:
        vectors = cache.load([offsets, 0])
        if CLEARED:
            vectors = tl.where(exists[:, None], vectors, 0.0)
        loaded = (vectors, vectors)
    else:
        loaded = load_vectors(cache, offsets, exists, dtype, SHAPE)
    return loaded


@triton.jit
def _attend_range(
    query,
    pairs,
    begin,
    end,
    oldest,
    newest,
    length,
    scale,
    softmax,
    SHAPE: constexpr_shape,
    TILE: tl.constexpr,
    BOXES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the tiles from `begin`, a multiple of TILE, to `end` to the softmax.

    A query that attends a whole tile gets the same bits whether it is MASKED or not.
    """
    keys, values, table, head, _, _ = pairs
    maximum, total, weighted = softmax
    for start in range(begin, end, TILE):
        kv_index = start + tl.arange(0, TILE)
        exists = (kv_index >= oldest) & (kv_index < newest) if MASKED else tl.full([TILE], True, tl.int1)
        if BOXES:  # the end of a tile is in the block of its beginning
            block = tl.load(table + start // SHAPE.block_size)
            key_offsets = (block * SHAPE.kv_heads + head) * SHAPE.block_size + start % SHAPE.block_size
            value_offsets = key_offsets
        else:
            key_offsets, value_offsets = kv_offsets(pairs, kv_index, exists, SHAPE)
        tile_keys = _load_tile(keys, key_offsets, exists, query[0].dtype, SHAPE, BOXES, SHAPE.shared and MASKED)
        scores = products(query, tile_keys, SHAPE)
        if SHAPE.soft_cap != 0:
            scores = bounded(scores * scale, SHAPE)
        factor = 1.0 if SHAPE.soft_cap != 0 else scale
        if MASKED:
            visible = kv_index[None, :] < length[:, None]
            if SHAPE.window:
                visible = visible & (kv_index[None, :] >= length[:, None] - SHAPE.window)
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        shift = new_maximum
        if MASKED:
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a query that has seen nothing yet
        shrink = tl.exp2(maximum - shift)
        weights = tl.exp2(scores * factor - shift[:, None])
        tile_values = tile_keys
        if not SHAPE.shared:
            tile_values = _load_tile(values, value_offsets, exists, query[0].dtype, SHAPE, BOXES, MASKED)
        weighted = add_weighted(weighted, shrink, weights, tile_values, SHAPE)
        total = total * shrink + tl.sum(weights, 1)
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit
def attend_16_bits(
    query,
    pairs,
    oldest,
    newest,
    length,
    scale,
    SHAPE: constexpr_shape,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BOXES: tl.constexpr,
):
    """Softmax of a tile of queries over KV pairs `oldest .. newest - 1`; a query attends those below its `length`, and
    of these, with a window, the last ones. With BOXES, keys and values are descriptors of `[slots, head_dim]`."""
    softmax = empty_softmax(ROWS, SHAPE)
    # Tiles from `inner_begin` to `inner_end` are attended whole by every query.
    inner_begin = tl.cdiv(tl.maximum(newest - SHAPE.window, 0), TILE) * TILE if SHAPE.window else 0
    inner_end = tl.maximum(inner_begin, tl.min(length, 0) // TILE * TILE)
    for part in tl.static_range(0 if SHAPE.window else 1, 3):
        begin, end = inner_end, newest
        if part == 0:
            begin, end = oldest // TILE * TILE, tl.minimum(inner_begin, newest)
        elif part == 1:
            begin, end = inner_begin, inner_end
        softmax = _attend_range(
            query, pairs, begin, end, oldest, newest, length, scale, softmax, SHAPE, TILE, BOXES, part != 1
        )
    return softmax
