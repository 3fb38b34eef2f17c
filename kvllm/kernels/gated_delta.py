"""The short convolution and the gated delta rule, as `kvllm.models.gated_delta` defines them.

Prompts are computed by chunks (`gated_delta_chunks`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvllm.kernels.gated_delta_chunks import FEW, MOST_KEY_CHANNELS, change_by_chunks

_PARTS = 32
"""Parts that the tokens of a prompt are convolved in."""
_CHANNELS = 256
_COLUMNS = 32
"""Columns of a state that one program changes: with key_dim 128, 32 registers of each thread hold them."""


@triton.jit
def _input(x, inputs, token, begin, slot, channel, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """A token's input, which is held where the token comes before the first one of this pass."""
    is_held = token < begin
    row = tl.where(is_held, slot * (TAPS - 1) + TAPS - 1 + token - begin, 0)
    held = tl.load(inputs + row * WIDTH + channel, mask=mask & is_held, other=0.0)
    return tl.load(x + token * STRIDE + channel, mask=mask & (token >= begin), other=0.0) + held


@triton.jit
def _convolve(
    out,
    x,
    taps,
    inputs,
    starts,
    slots,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < WIDTH
    begin, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64)
    size = tl.cdiv(end - begin, tl.num_programs(2))
    first = begin + tl.program_id(2) * size
    for token in range(first, tl.minimum(end, first + size)):
        total = tl.zeros((CHANNELS,), tl.float32)
        for tap in tl.static_range(TAPS):
            weight = tl.load(taps + tap * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
            found = _input(x, inputs, token - TAPS + 1 + tap, begin, slot, channel, mask, STRIDE, WIDTH, TAPS)
            total += weight * found.to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + token * WIDTH + channel, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _keep_inputs(
    x, inputs, starts, slots, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr
):
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < WIDTH
    begin, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64)
    for i in tl.static_range(TAPS - 1):  # ascending: what is read has not been overwritten
        kept = _input(x, inputs, end - TAPS + 1 + i, begin, slot, channel, mask, STRIDE, WIDTH, TAPS)
        tl.store(inputs + (slot * (TAPS - 1) + i) * WIDTH + channel, kept, mask=mask)


def short_convolution(
    x: torch.Tensor,
    taps: torch.Tensor,
    inputs: torch.Tensor,
    query_start_loc: torch.Tensor,
    slots: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """`[T, channels]`, whose rows may be apart; taps `[taps, channels]`; inputs `[slots, taps - 1, channels]`, which
    are changed -> contiguous `[T, channels]`."""
    (num_tokens, width), num_seqs = x.shape, len(slots)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    parts = 1 if num_tokens <= num_seqs else _PARTS
    blocks = triton.cdiv(width, _CHANNELS)
    shape = {"STRIDE": x.stride(0), "WIDTH": width, "TAPS": len(taps), "CHANNELS": _CHANNELS, "num_warps": 4}
    _convolve[(num_seqs, blocks, parts)](out, x, taps, inputs, query_start_loc, slots, SILU=silu, **shape)
    _keep_inputs[(num_seqs, blocks)](x, inputs, query_start_loc, slots, **shape)
    return out


@triton.jit
def _of_length_one(vectors, index, DIM: tl.constexpr):
    """A vector, of zeros from DIM on, in float32."""
    x = tl.load(vectors + index, mask=index < DIM, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit(do_not_specialize=["most"])
def _change_states(
    out,
    mixed,
    factors,
    strengths,
    states,
    starts,
    slots,
    scale,
    most,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of the state of one head of a sequence of up to `most` tokens, token by token."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    if end - begin > most:
        return
    index, column = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < VALUE_DIM
    of_keys = KEY_HEADS * KEY_DIM
    key_head = head // (HEADS // KEY_HEADS)
    first = (tl.load(slots + sequence).to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
    pointers = states + first + index[:, None] * VALUE_DIM + column[None, :]
    mask = (index < KEY_DIM)[:, None] & is_column[None, :]
    state = tl.load(pointers, mask=mask, other=0.0)
    for token in range(begin, end):
        row = mixed + token * (2 * of_keys + HEADS * VALUE_DIM)
        query = _of_length_one(row + key_head * KEY_DIM, index, KEY_DIM) * scale
        key = _of_length_one(row + of_keys + key_head * KEY_DIM, index, KEY_DIM)
        value = tl.load(row + 2 * of_keys + head * VALUE_DIM + column, mask=is_column, other=0.0).to(tl.float32)
        state *= tl.load(factors + token * HEADS + head)
        change = (value - tl.sum(key[:, None] * state, 0)) * tl.load(strengths + token * HEADS + head)
        state += key[:, None] * change[None, :]
        found = tl.sum(query[:, None] * state, 0).to(out.dtype.element_ty)
        tl.store(out + (token * HEADS + head) * VALUE_DIM + column, found, mask=is_column)
    tl.store(pointers, state, mask=mask)


def gated_delta_rule(
    mixed: torch.Tensor,
    factors: torch.Tensor,
    strengths: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    slots: torch.Tensor,
    key_heads: int,
) -> torch.Tensor:
    """Contiguous `[T, ...]`; factors and strengths float32 `[T, heads]`; states float32 `[slots, heads, key_dim,
    value_dim]`, which are changed -> `[T, heads, value_dim]`."""
    (num_tokens, num_seqs), (heads, key_dim, value_dim) = (len(mixed), len(slots)), states.shape[1:]
    out = torch.empty((num_tokens, heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    inputs = mixed, factors.contiguous(), strengths.contiguous(), states, query_start_loc, slots
    by_chunks = num_tokens > num_seqs + FEW and key_dim <= MOST_KEY_CHANNELS
    shape = {"KEY_HEADS": key_heads, "HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "num_warps": 4}
    _change_states[(triton.cdiv(value_dim, _COLUMNS), heads, num_seqs)](
        out,
        *inputs,
        key_dim**-0.5,
        FEW if by_chunks else 1 << 30,
        KEYS=triton.next_power_of_2(key_dim),
        COLUMNS=_COLUMNS,
        **shape,
    )
    if by_chunks:
        change_by_chunks(out, *inputs, shape)
    return out
