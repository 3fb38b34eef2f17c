"""How unlike the others the keys of a window are, read from the blocks of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvllm.kernels.layer_shape import LayerShape, constexpr_shape
from kvllm.kernels.tiles import kv_offsets, load_channels


@triton.jit
def _unit_keys(
    keys,
    table,
    key,
    num_keys,
    head,
    DTYPE: tl.constexpr,
    SHAPE: constexpr_shape,
    CHANNELS: tl.constexpr,
):
    """Keys of length 1, float32 `[keys, CHANNELS]`; those that do not exist are 0."""
    exists = key < num_keys
    offsets, _ = kv_offsets((keys, keys, table, head, num_keys, 0), key, exists, SHAPE)
    vectors = load_channels(keys, offsets, exists, DTYPE, SHAPE.head_dim, 0, CHANNELS).to(tl.float32)
    if SHAPE.head_dim != CHANNELS:  # where codes of 4 bits are read, channels after the last are not 0
        vectors = tl.where((tl.arange(0, CHANNELS) < SHAPE.head_dim)[None, :], vectors, 0.0)
    lengths = tl.sqrt(tl.sum(vectors * vectors, 1))
    return vectors / tl.maximum(lengths, 1e-12)[:, None]


@triton.jit(
    do_not_specialize=["num_keys", "table_stride"],
    do_not_specialize_on_alignment=["scores"],  # a layer's begin where the number of windows has them begin
)
def _compare_to_mean(
    scores,
    keys,
    tables,
    num_keys,
    table_stride,
    DTYPE: tl.constexpr,
    SHAPE: constexpr_shape,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A program for each window and KV head, which reads its keys twice."""
    window, head = tl.program_id(0), tl.program_id(1)
    table = tables + window * table_stride
    mean = tl.zeros([CHANNELS], tl.float32)
    for begin in range(0, num_keys, TILE):
        key = begin + tl.arange(0, TILE)
        unit = _unit_keys(keys, table, key, num_keys, head, DTYPE, SHAPE, CHANNELS)
        mean += tl.sum(unit, 0) / num_keys
    anchor = mean / tl.maximum(tl.sqrt(tl.sum(mean * mean, 0)), 1e-12)
    row = scores + (window.to(tl.int64) * SHAPE.kv_heads + head) * num_keys
    for begin in range(0, num_keys, TILE):
        key = begin + tl.arange(0, TILE)
        unit = _unit_keys(keys, table, key, num_keys, head, DTYPE, SHAPE, CHANNELS)
        tl.store(row + key, -tl.sum(unit * anchor[None, :], 1), mask=key < num_keys)


def key_differences(
    layers: Sequence[torch.Tensor], tables: torch.Tensor, size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """`kvllm.compression.methods.keydiff.scores` of the first `size` keys of windows in a cache.

    layers: `[blocks, Hkv, block_size, width]` each, of `dtype` or quantized.
    tables: contiguous int `[S, n]`, the blocks of the windows. dtype: that methods see keys in.

    Returns float32 `[layers * S, Hkv, size]`, with an order of summation that depends on `size` and `head_dim` alone.
    """
    num_windows, kv_heads = len(tables), layers[0].shape[1]
    channels = max(16, triton.next_power_of_2(head_dim))
    scores = torch.empty(len(layers) * num_windows, kv_heads, size, dtype=torch.float32, device=tables.device)
    for of_layer, keys in zip(scores.split(num_windows), layers, strict=True):
        _compare_to_mean[(num_windows, kv_heads)](
            of_layer,
            keys,
            tables,
            size,
            tables.shape[1],
            DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
            SHAPE=LayerShape(kv_heads, 1, keys.shape[2], head_dim),
            CHANNELS=channels,
            TILE=min(32, (8 << 10) // channels),
            num_warps=4,
        )
    return scores
