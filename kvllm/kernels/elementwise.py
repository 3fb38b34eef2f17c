"""The work between the matrix products: RMSNorm, rotary embedding, gated activation.

Arithmetic and roundings are those of the torch functions in `kvllm.models.elementwise`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rms_norm_row(output, residual, x, weight, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, COLUMNS)
    mask = column < WIDTH
    dtype = x.dtype.element_ty
    row = tl.load(x + first + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        row = (row + tl.load(residual + first + column, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + first + column, row, mask=mask)
        row = row.to(tl.float32)
    scaled = (row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)).to(weight.dtype.element_ty).to(tl.float32)
    weighted = scaled * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + first + column, weighted.to(dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension: contiguous `[T, D]`, weight `[D]` of the same dtype or float32 -> `[T, D]`."""
    return _launch_rms_norm(x, x, weight, eps, add=False)


def add_rms_norm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place and return the RMSNorm of the sum; both contiguous `[T, D]`."""
    return _launch_rms_norm(residual, x, weight, eps, add=True)


def _launch_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, *, add: bool
) -> torch.Tensor:
    output = torch.empty_like(x)
    num_rows, width = x.shape
    _rms_norm_row[(num_rows,)](
        output,
        residual,
        x,
        weight,
        eps,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ADD=add,
        num_warps=4 if width <= 4096 else 8,
    )
    return output


@triton.jit
def _silu_mul_chunk(output, gate_up, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = column < WIDTH
    dtype = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + row * WIDTH + column, (activated * up).to(dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of contiguous `[T, 2 * I]`, gate in the first half -> `[T, I]`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, width)
    chunk = min(1024, triton.next_power_of_2(width))
    _silu_mul_chunk[(num_rows, triton.cdiv(width, chunk))](output, gate_up, WIDTH=width, CHUNK=chunk, num_warps=4)
    return output


@triton.jit
def _load_half(heads, offsets, mask, q_weight, k_weight, channel, is_query, NORM: tl.constexpr):
    """Half the channels of some heads, and the weight of their norm."""
    x = tl.load(heads + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = x
    if NORM:
        q = tl.load(q_weight + channel, mask=mask & is_query, other=0.0).to(tl.float32)
        k = tl.load(k_weight + channel, mask=mask & (is_query == 0), other=0.0).to(tl.float32)
        weight = q + k  # one of them is 0
    return x, weight


@triton.jit
def _rotate_heads(
    qkv,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    row_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    NORM: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    mask = (head < HEADS) & (channel < HALF)
    dtype = qkv.dtype.element_ty
    offsets = row * row_stride + head * (2 * HALF) + channel
    low, low_weight = _load_half(qkv, offsets, mask, q_weight, k_weight, channel, head < QUERY_HEADS, NORM)
    high, high_weight = _load_half(
        qkv, offsets + HALF, mask, q_weight, k_weight, channel + HALF, head < QUERY_HEADS, NORM
    )
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        narrow = q_weight.dtype.element_ty
        low = ((low * scale).to(narrow).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * scale).to(narrow).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    angles = cos_sin + tl.load(positions + row) * (2 * HALF) + channel
    cos = tl.load(angles, mask=channel < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=channel < HALF, other=0.0)
    tl.store(qkv + offsets, (low * cos - high * sin).to(dtype), mask=mask)
    tl.store(qkv + offsets + HALF, (high * cos + low * sin).to(dtype), mask=mask)


def rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Normalize (with both weights or none) and rotate the query and key heads of `qkv` in place.

    The arguments are those of `kvllm.models.elementwise.rotary`.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys are both normalized or both not: pass q_weight and k_weight, or neither")
    num_heads = num_query_heads + num_kv_heads
    _rotate_heads[(qkv.shape[0], triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        qkv,
        positions,
        cos_sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        qkv.stride(0),
        eps,
        QUERY_HEADS=num_query_heads,
        HEADS=num_heads,
        HALF=head_dim // 2,
        CHANNELS=triton.next_power_of_2(head_dim // 2),
        NORM=q_weight is not None,
        HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
