"""Scores of a window: attention mass of its keys, or its squares, in two passes, without storing the matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.capability import multiplies_from_memory
from kvllm.kernels.layer_shape import LayerShape, constexpr_shape
from kvllm.kernels.tiles import LOG2_E, bounded, kv_offsets, load_vectors, products


@triton.jit
def _load_queries(
    queries,
    sequence,
    head,
    row,
    num_tokens,
    sequence_stride,
    head_stride,
    token_stride,
    SHAPE: constexpr_shape,
):
    """Rows `row` of the queries of a KV head: all tokens of its first query head, then those of the next."""
    offsets = (
        sequence.to(tl.int64) * sequence_stride
        + (head * SHAPE.group + row // num_tokens).to(tl.int64) * head_stride
        + (row % num_tokens).to(tl.int64) * token_stride
    )
    exists = row < SHAPE.group * num_tokens
    return load_vectors(queries, (offsets, offsets), exists, queries.dtype.element_ty, SHAPE)


@triton.jit
def _load_keys(keys, tables, sequence, head, key, num_keys, window, dtype: tl.constexpr, SHAPE: constexpr_shape):
    """Keys of one head: of contiguous windows of `window` keys if blocks have no size, else in blocks, of which
    `tables` has `window` for each sequence."""
    exists = key < num_keys
    if SHAPE.block_size == 0:
        elements = ((sequence.to(tl.int64) * SHAPE.kv_heads + head) * window + key) * SHAPE.head_dim
        offsets = (elements, elements)
    else:
        table = tables + sequence * window
        offsets, _ = kv_offsets((keys, keys, table, head, num_keys, 0), key, exists, SHAPE)
    return load_vectors(keys, offsets, exists, dtype, SHAPE)


@triton.jit
def _last_key(last_kv_index, row, num_tokens, num_keys, SHAPE: constexpr_shape, MASKED: tl.constexpr):
    """The last key that the query of each row attends to."""
    last = tl.zeros_like(row) + num_keys - 1
    if MASKED:
        exists = row < SHAPE.group * num_tokens
        last = tl.minimum(tl.load(last_kv_index + row % num_tokens, mask=exists, other=0).to(tl.int32), last)
    return last


@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "window"],
    do_not_specialize_on_alignment=["inverses"],  # they begin where the number of query tokens has them begin
)
def _row_softmax(
    queries,
    keys,
    tables,
    last_kv_index,
    maxima,
    inverses,
    sinks,
    scale,
    num_tokens,
    num_keys,
    window,
    sequence_stride,
    head_stride,
    token_stride,
    SHAPE: constexpr_shape,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """First pass: the maximum of each row's scores and 1 / the sum of their exponentials.

    MASKED: a query token attends to keys up to its `last_kv_index`, int64 `[num_tokens]`, else to all. SINKS: the
    learned score of the row's query head is one of its scores.
    """
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * ROWS + tl.arange(0, ROWS)
    query = _load_queries(queries, sequence, head, row, num_tokens, sequence_stride, head_stride, token_stride, SHAPE)
    last = _last_key(last_kv_index, row, num_tokens, num_keys, SHAPE, MASKED)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        exists = row < SHAPE.group * num_tokens
        maximum = tl.load(sinks + head * SHAPE.group + row // num_tokens, mask=exists, other=0.0) * 1.4426950408889634
        total += 1.0
    for begin in range(0, num_keys, KEYS):
        key = begin + tl.arange(0, KEYS)
        key_tile = _load_keys(keys, tables, sequence, head, key, num_keys, window, queries.dtype.element_ty, SHAPE)
        scores = bounded(products(query, key_tile, SHAPE) * scale, SHAPE)
        scores = tl.where(key[None, :] <= last[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        total = total * tl.exp2(maximum - new_maximum) + tl.sum(tl.exp2(scores - new_maximum[:, None]), 1)
        maximum = new_maximum
    offset = (sequence.to(tl.int64) * SHAPE.kv_heads + head) * (SHAPE.group * num_tokens) + row
    tl.store(maxima + offset, maximum, mask=row < SHAPE.group * num_tokens)
    tl.store(inverses + offset, 1.0 / total, mask=row < SHAPE.group * num_tokens)


@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "window"],
    do_not_specialize_on_alignment=["inverses"],  # they begin where the number of query tokens has them begin
)
def _column_sums(
    mass,
    queries,
    keys,
    tables,
    last_kv_index,
    maxima,
    inverses,
    scale,
    num_tokens,
    num_keys,
    window,
    sequence_stride,
    head_stride,
    token_stride,
    SHAPE: constexpr_shape,
    MASKED: tl.constexpr,
    SQUARED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Second pass: the probabilities of a tile of keys, or their squares, added up over all rows in ascending tiles."""
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key = tile * KEYS + tl.arange(0, KEYS)
    key_tile = _load_keys(keys, tables, sequence, head, key, num_keys, window, queries.dtype.element_ty, SHAPE)
    first_offset = (sequence.to(tl.int64) * SHAPE.kv_heads + head) * (SHAPE.group * num_tokens)
    sums = tl.zeros([ROWS, KEYS], tl.float32)
    for begin in range(0, SHAPE.group * num_tokens, ROWS):
        row = begin + tl.arange(0, ROWS)
        query = _load_queries(
            queries, sequence, head, row, num_tokens, sequence_stride, head_stride, token_stride, SHAPE
        )
        exists = row < SHAPE.group * num_tokens
        maximum = tl.load(maxima + first_offset + row, mask=exists, other=0.0)
        inverse = tl.load(inverses + first_offset + row, mask=exists, other=0.0)
        scores = bounded(products(query, key_tile, SHAPE) * scale, SHAPE)
        probabilities = tl.exp2(scores - maximum[:, None]) * inverse[:, None]
        if MASKED:
            last = _last_key(last_kv_index, row, num_tokens, num_keys, SHAPE, MASKED)
            probabilities = tl.where(key[None, :] <= last[:, None], probabilities, 0.0)
        sums += probabilities * probabilities if SQUARED else probabilities
    offset = (sequence.to(tl.int64) * SHAPE.kv_heads + head) * num_keys + key
    tl.store(mass + offset, tl.sum(sums, 0), mask=key < num_keys)


def _tiles(dtype: torch.dtype, head_dim: int, *, plain: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the tiles of both passes, and the warps of a program, over keys of `dtype`; without options of a layer,
    which need more registers, if `plain`.

    The side that a program keeps is as large as it can be, because all of the other side passes through.
    """
    if dtype == torch.float32 or head_dim > 256:
        rows, keys = (16, 32 if head_dim <= 256 else 16) if dtype == torch.float32 else (32, 32)
        tile = {"ROWS": rows, "KEYS": keys, "num_warps": 8}
        return tile, tile
    width = 128 if head_dim <= 128 else 64
    # Where operands take registers, what codes are decoded to would not fit in them, and of wide heads, not in 99 KiB.
    halved = not multiplies_from_memory() and (head_dim > 128 or dtype.itemsize == 1)
    first_keys = width // 2 if halved else width
    return (
        {"ROWS": 128 if plain else 64, "KEYS": first_keys, "num_warps": 8},
        {"ROWS": 64, "KEYS": width, "num_warps": 4 if plain else 8},
    )


def window_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    num_keys: int,
    scale: float,
    last_kv_index: torch.Tensor | None = None,
    *,
    tables: torch.Tensor | None = None,
    squared: bool = False,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention probability that each of the first `num_keys` keys receives from all queries (Kara paper, Eq. 4).

    queries: `[S, Hq, query tokens, d]`; the channels contiguous, or they are copied.
    keys: contiguous `[S, Hkv, W, d]` of the same dtype; with `tables`, contiguous int `[S, n]`, a layer of a cache,
        `[blocks, Hkv, block_size, width]` of the same dtype or quantized, that has the keys in these blocks.
    last_kv_index: int64 `[query tokens]`, the key up to which each token attends; None: to all.
    squared: add up the squares. soft_cap, sinks: as in Softmax.

    Returns float32 `[S, Hkv, num_keys]`; products are accumulated in float32, and sums have an order that depends on
    none of S, Hq and Hkv.
    """
    if queries.stride(3) != 1:
        queries = queries.contiguous()
    num_sequences, num_heads, num_tokens, head_dim = queries.shape
    _, kv_heads, window, _ = keys.shape
    pages, block_size = keys, 0
    if tables is not None:
        pages, window, block_size = tables, tables.shape[1], keys.shape[2]
    group = num_heads // kv_heads
    maxima, inverses = torch.empty(
        2, num_sequences, kv_heads, group * num_tokens, dtype=torch.float32, device=keys.device
    ).unbind()
    mass = torch.empty(num_sequences, kv_heads, num_keys, dtype=torch.float32, device=keys.device)
    sizes = (scale * LOG2_E, num_tokens, num_keys, window, *queries.stride()[:3])
    shape = LayerShape(kv_heads, group, block_size, head_dim, soft_cap=(soft_cap or 0.0) * LOG2_E)
    options = {"SHAPE": shape, "MASKED": last_kv_index is not None, "num_stages": 2}
    first, second = _tiles(keys.dtype, head_dim, plain=soft_cap is None and sinks is None)
    row_tiles, key_tiles = triton.cdiv(group * num_tokens, first["ROWS"]), triton.cdiv(num_keys, second["KEYS"])
    _row_softmax[(num_sequences, kv_heads, row_tiles)](
        queries,
        keys,
        pages,
        last_kv_index,
        maxima,
        inverses,
        maxima if sinks is None else sinks,
        *sizes,
        **options,
        **first,
        SINKS=sinks is not None,
    )
    _column_sums[(num_sequences, kv_heads, key_tiles)](
        mass, queries, keys, pages, last_kv_index, maxima, inverses, *sizes, **options, **second, SQUARED=squared
    )
    return mass
