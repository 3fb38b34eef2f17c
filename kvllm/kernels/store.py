"""Write keys and values of new tokens into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.codes import code_offsets, store_codes


@triton.jit
def _store_token(
    key_cache,
    value_cache,
    keys,
    values,
    slots,
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    column = tl.arange(0, WIDTH)
    mask = column < KV_HEADS * HEAD_DIM
    head_slot = slot // BLOCK_SIZE * (KV_HEADS * BLOCK_SIZE) + column // HEAD_DIM * BLOCK_SIZE + slot % BLOCK_SIZE
    target = head_slot * HEAD_DIM + column % HEAD_DIM
    tl.store(key_cache + target, tl.load(keys + token * key_stride + column, mask=mask), mask=mask)
    tl.store(value_cache + target, tl.load(values + token * value_stride + column, mask=mask), mask=mask)


@triton.jit
def _store_codes(
    key_cache,
    value_cache,
    keys,
    values,
    slots,
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """A program for each token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    codes, words = code_offsets(key_cache, block, offset, head, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    store_codes(key_cache, codes, words, keys + token * key_stride + head * HEAD_DIM, HEAD_DIM, CHANNELS, ROTATED)
    codes, words = code_offsets(value_cache, block, offset, head, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    store_codes(value_cache, codes, words, values + token * value_stride + head * HEAD_DIM, HEAD_DIM, CHANNELS, ROTATED)


def store_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    rotated: bool = False,
) -> None:
    """Write the keys and values of tokens to their slots; a negative slot is skipped.

    key_cache, value_cache: one layer, contiguous `[blocks, kv_heads, block_size, width]`, of the dtype of keys and
        values and as wide as they are, or quantized.
    keys, values: `[T, kv_heads, head_dim]`; the heads of a token contiguous, tokens anywhere.
    slots: int64 `[T]`, each at most once. rotated: codes are those of vectors times a Hadamard matrix.
    """
    (num_tokens, kv_heads, head_dim), block_size = keys.shape, key_cache.shape[2]
    arguments = (key_cache, value_cache, keys, values, slots, keys.stride(0), values.stride(0))
    shape = {"KV_HEADS": kv_heads, "BLOCK_SIZE": block_size, "HEAD_DIM": head_dim}
    if key_cache.dtype == keys.dtype:
        width = triton.next_power_of_2(kv_heads * head_dim)
        _store_token[(num_tokens,)](*arguments, **shape, WIDTH=width, num_warps=4)
    else:
        channels = triton.next_power_of_2(head_dim)
        # A product and a sum in one instruction would round otherwise than the formulas do.
        options = {"CHANNELS": channels, "ROTATED": rotated, "num_warps": 1, "enable_fp_fusion": False}
        _store_codes[(num_tokens, kv_heads)](*arguments, **shape, **options)
