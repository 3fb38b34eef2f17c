"""Rotation of vectors by a Hadamard matrix, as `kvllm.kvcache.hadamard` defines it: queries in front of the kernels
that read rotated keys, and outputs after those that read rotated values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16
"""Vectors of a program."""


@triton.constexpr_function
def _stages(size: int) -> int:
    return size.bit_length() - 1


@triton.jit
def rotate(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """float32 `[ROWS, SIZE]`, times the matrix."""
    SCALE: tl.constexpr = SIZE**-0.5
    for _ in tl.static_range(_stages(SIZE)):  # each moves the lowest bit of a channel's index to the top
        first, second = tl.split(tl.reshape(x, [ROWS, SIZE // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [ROWS, SIZE])
    return x * SCALE


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(rotated, vectors, token_stride, num_rows, HEADS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """A program for ROWS vectors of SIZE channels."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel, mask = tl.arange(0, SIZE)[None, :], (row < num_rows)[:, None]
    offsets = row // HEADS * token_stride + row % HEADS * SIZE
    x = tl.load(vectors + offsets[:, None] + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(rotated + row[:, None] * SIZE + channel, rotate(x, ROWS, SIZE).to(rotated.dtype.element_ty), mask=mask)


def hadamard(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors `[T, heads, d]`, times the matrix -> contiguous, of the same dtype.

    The heads of a token are contiguous, tokens anywhere; d is a power of two.
    """
    num_tokens, num_heads, size = vectors.shape
    rotated = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    num_rows = num_tokens * num_heads
    _rotate_rows[(triton.cdiv(num_rows, _ROWS),)](
        rotated, vectors, vectors.stride(0), num_rows, HEADS=num_heads, ROWS=_ROWS, SIZE=size, num_warps=4
    )
    return rotated
