"""Vectors of a quantized cache: where one lies, and its two directions. kvcache/quantize.py has the formulas.

The dtype of keys, or of values, in a cache tells their format, as in `kvllm.kvcache.quantize`. A vector is codes and a
word of 32 bits that holds its scale; the bytes of one head in one block are the codes of all its vectors, then their
words. Codes of rotated vectors are read as others are: who launches a kernel rotates what it gives and takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvllm.kernels.hadamard import rotate
from kvllm.quantized_vectors import EXCESS_6 as EXCESS_OF_6_BITS
from kvllm.quantized_vectors import SCALE_BYTES as BYTES_OF_SCALE
from kvllm.quantized_vectors import SMALLEST_MAGNITUDE as LEAST_MAGNITUDE

SCALE_BYTES = tl.constexpr(BYTES_OF_SCALE)
SMALLEST_MAGNITUDE = tl.constexpr(LEAST_MAGNITUDE)
EXCESS_6 = tl.constexpr(EXCESS_OF_6_BITS)


_READ_AS = {torch.float4_e2m1fn_x2: torch.uint8, torch.float8_e5m2fnuz: torch.float8_e5m2}


def as_kernels_read(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Keys, or values, of the layers of a cache, views: as those that are not rotated, whose codes are alike."""
    return [each.view(_READ_AS.get(each.dtype, each.dtype)) for each in layers]


@triton.constexpr_function
def _bits(element_ty: tl.dtype) -> int:
    """Of a code in a cache of elements of this type."""
    if element_ty == tl.float8e5:
        return 6
    return 4 if element_ty == tl.uint8 else 8


@triton.jit
def code_offsets(cache, blocks, slots, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where the codes of vectors begin in a layer, in bytes, and their words, in words; `slots` are those in blocks."""
    BITS: tl.constexpr = _bits(cache.dtype.element_ty)
    CODES: tl.constexpr = HEAD_DIM * BITS // 8
    heads = blocks * KV_HEADS + head
    codes = heads * (BLOCK_SIZE * (CODES + SCALE_BYTES)) + slots * CODES
    words = heads * (BLOCK_SIZE * (CODES + SCALE_BYTES) // SCALE_BYTES) + BLOCK_SIZE * CODES // SCALE_BYTES + slots
    return codes, words


@triton.jit
def load_codes(cache, codes, words, exists, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr):
    """Channels from FIRST on of the vectors at `codes` and `words`, float32 `[vectors, CHANNELS]`; 0 where one does not
    exist.

    Channels after HEAD_DIM are a number that does not matter: queries are 0 there.
    """
    word = tl.load(cache.to(tl.pointer_type(tl.uint32)) + words, mask=exists, other=0)
    if cache.dtype.element_ty == tl.uint8:
        byte = FIRST // 2 + tl.arange(0, CHANNELS // 2)
        mask = exists[:, None] & (byte < HEAD_DIM // 2)[None, :]
        both = tl.load(cache + codes[:, None] + byte[None, :], mask=mask, other=0)
        scale = (word << 16).to(tl.float32, bitcast=True)
        zero = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
        vectors = tl.interleave(both & 15, both >> 4).to(tl.float32) * scale[:, None] + zero[:, None]
    elif cache.dtype.element_ty == tl.float8e5:
        begin, byte = (
            cache.to(tl.pointer_type(tl.uint8)) + codes[:, None],
            FIRST // 2 + tl.arange(0, CHANNELS // 2)[None, :],
        )
        mask = exists[:, None] & (byte < HEAD_DIM // 2)
        both = tl.load(begin + byte, mask=mask, other=0).to(tl.int32)
        high = tl.load(begin + (HEAD_DIM // 2 + byte // 2), mask=mask, other=0).to(tl.int32) >> byte % 2 * 4
        integers = tl.interleave((both & 15) | (high & 3) << 4, (both >> 4) | (high & 12) << 2) - EXCESS_6
        vectors = integers.to(tl.float32) * word.to(tl.float32, bitcast=True)[:, None]
    else:
        channel = FIRST + tl.arange(0, CHANNELS)
        mask = exists[:, None] & (channel < HEAD_DIM)[None, :]
        numbers = tl.load(cache + codes[:, None] + channel[None, :], mask=mask, other=0.0)
        vectors = numbers.to(tl.float32) * word.to(tl.float32, bitcast=True)[:, None]
    return vectors


@triton.jit
def store_codes(cache, codes, words, vector, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, ROTATED: tl.constexpr):
    """Quantize the HEAD_DIM channels at `vector`, and write them to `codes` and `words`. ROTATED: times a Hadamard
    matrix, in 4 or 6 bits.

    The scale, or the zero point, of a vector that is not finite is NaN.
    """
    if cache.dtype.element_ty == tl.uint8:
        byte = tl.arange(0, CHANNELS // 2)
        exists = byte < HEAD_DIM // 2
        if ROTATED:
            x = tl.load(vector + tl.arange(0, CHANNELS)).to(tl.float32)
            x = rotate(tl.reshape(x, [1, CHANNELS]), 1, CHANNELS)
            even, odd = tl.split(tl.reshape(x, [CHANNELS // 2, 2]))
        else:
            even = tl.load(vector + 2 * byte, mask=exists, other=0.0).to(tl.float32)
            odd = tl.load(vector + 2 * byte + 1, mask=exists, other=0.0).to(tl.float32)
        nan = tl.sum((even + odd) * 0.0, 0)
        low = tl.min(tl.where(exists, tl.minimum(even, odd), float("inf")), 0) + nan
        high = tl.max(tl.where(exists, tl.maximum(even, odd), float("-inf")), 0)
        scale = _as_bfloat16(tl.div_rn(high - low, 15.0))
        scale = tl.where(scale == 0.0, 1.0, scale)
        zero = _as_bfloat16(low)
        both = _code_of_4_bits(even, scale, zero) | (_code_of_4_bits(odd, scale, zero) << 4)
        tl.store(cache + codes + byte, both.to(tl.uint8), mask=exists)
        word = (scale.to(tl.uint32, bitcast=True) >> 16) | zero.to(tl.uint32, bitcast=True)
    else:
        IS_FLOAT: tl.constexpr = cache.dtype.element_ty == tl.float8e4nv
        HAS_SIX_BITS: tl.constexpr = cache.dtype.element_ty == tl.float8e5
        LARGEST = 448.0 if IS_FLOAT else (31.0 if HAS_SIX_BITS else 127.0)
        channel = tl.arange(0, CHANNELS)
        exists = channel < HEAD_DIM
        x = tl.load(vector + channel, mask=exists, other=0.0).to(tl.float32)
        if ROTATED:
            x = tl.reshape(rotate(tl.reshape(x, [1, CHANNELS]), 1, CHANNELS), [CHANNELS])
        magnitude = tl.maximum(tl.max(tl.abs(x), 0), SMALLEST_MAGNITUDE) + tl.sum(x * 0.0, 0)
        scale = tl.div_rn(magnitude, LARGEST)
        numbers = tl.minimum(tl.maximum(tl.div_rn(x, scale), -LARGEST), LARGEST)
        numbers = _round_to_float8(numbers) if IS_FLOAT else _round_to_multiple(numbers, 1.0)
        if HAS_SIX_BITS:
            _store_six_bits(
                cache.to(tl.pointer_type(tl.uint8)) + codes, numbers.to(tl.int32) + EXCESS_6, HEAD_DIM, CHANNELS
            )
        else:
            tl.store(cache + codes + channel, numbers.to(cache.dtype.element_ty), mask=exists)
        word = scale.to(tl.uint32, bitcast=True)
    tl.store(cache.to(tl.pointer_type(tl.uint32)) + words, word)


@triton.jit
def _store_six_bits(begin, codes, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Low 4 bits of all channels, and then high 2 bits."""
    even, odd = tl.split(tl.reshape(codes, [CHANNELS // 2, 2]))
    byte = tl.arange(0, CHANNELS // 2)
    tl.store(begin + byte, ((even & 15) | (odd & 15) << 4).to(tl.uint8), mask=byte < HEAD_DIM // 2)
    high = (even >> 4 & 3) | (odd >> 4 & 3) << 2
    first, second = tl.split(tl.reshape(high, [CHANNELS // 4, 2]))
    byte = tl.arange(0, CHANNELS // 4)
    tl.store(begin + (HEAD_DIM // 2 + byte), (first | second << 4).to(tl.uint8), mask=byte < HEAD_DIM // 4)


@triton.jit
def _code_of_4_bits(x, scale, zero):
    return _round_to_multiple(tl.minimum(tl.maximum(tl.div_rn(x - zero, scale), 0.0), 15.0), 1.0).to(tl.int32)


@triton.jit
def _round_to_multiple(x, step):
    """The nearest multiple of `step`, a power of two; an even one from the middle. |x| is below 2^22 steps."""
    shift = step * 12582912.0  # 1.5 * 2^23: a sum with it has no bits below `step`
    return (x + shift) - shift


@triton.jit
def _round_to_float8(x):
    """The nearest number of float8e4nv, of which the conversion that follows loses nothing on any device."""
    bits = x.to(tl.uint32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    rounded = _round_to_multiple(x, tl.maximum(power, 0.015625) * 0.125)  # 2^-6, below which numbers are subnormal
    return (rounded.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)  # -0 stays -0


@triton.jit
def _as_bfloat16(x):
    """The nearest bfloat16, as a float32; an even one from the middle."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded, 0x7FC00000).to(tl.float32, bitcast=True)
