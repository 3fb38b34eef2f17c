"""The gated delta rule of prompts, many tokens at once.

The chunked form of the rule (Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence
Length, 2024, section 3; with gates, Gated Delta Networks, 2024, section 3.3). Of the tokens of a chunk, with keys K,
values V, strengths b, and L_ij what is left to token i of token j <= i, L_i of what was before the chunk:

    A = strict lower (diag(b) (L * K K^T));  [w, u] = (I + A)^-1 diag(b) [diag(L_i) K, V]
    changes = u - w S;  O = diag(L_i) Q S + (L * Q K^T) changes;  S <- L_last S + K^T diag(L_last,j) changes

In three kernels, as all in one takes more registers than there are: w and u of all chunks at once; states, one chunk
after another; what all chunks read. Products with float32 are of TF32, for a model of float32 of three parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

FEW = 16
"""Tokens of a sequence that are computed one by one; more are computed by chunks."""
_CHUNK, _CHANNELS, _COLUMNS, _COLUMNS_OF_STATE = 32, 32, 128, 16
"""Tokens of a chunk, and of their vectors and states what products take at a time. Chunks of 64, or 32 columns of a
state, spill."""
MOST_KEY_CHANNELS = 128
"""Of chunks. 256 spill."""
_SEQUENCES = 256
"""That a program looks at, at a time, for its own: a constant, or each number of sequences would be compiled for."""


@triton.jit
def _chunk_of_program(starts, num_seqs, MOST: tl.constexpr, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr):
    """The chunk's first token, and where its sequence ends: no later if the program has none, as one of sequences of
    up to MOST tokens. Lengths are not known to the host: sequence s has the programs from `starts[s] // CHUNK + s` on.
    """
    program, own = tl.program_id(0), -1
    for first in range(0, num_seqs, SEQUENCES):
        sequence = first + tl.arange(0, SEQUENCES)
        mask = sequence < num_seqs
        firsts = tl.load(starts + sequence, mask=mask, other=0) // CHUNK + sequence
        own += tl.sum((mask & (firsts <= program)).to(tl.int32), 0)
    begin, end = tl.load(starts + own).to(tl.int64), tl.load(starts + own + 1).to(tl.int64)
    chunk = begin + (program - begin // CHUNK - own) * CHUNK
    return tl.where(end - begin > MOST, chunk, end), end


@triton.jit
def _weights_between(total, CHUNK: tl.constexpr):
    """What is left to a token (row) of each one up to it (column). Of later ones it could overflow."""
    row = tl.arange(0, CHUNK)
    left = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    return tl.where(row[:, None] >= row[None, :], left, 0.0)


@triton.jit(do_not_specialize=["num_seqs"])
def _solve_chunks(
    w,
    u,
    totals,
    lengths,
    mixed,
    factors,
    strengths,
    starts,
    num_seqs,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """w and u of the tokens of a chunk and a head; the logarithms of L_i, and what makes keys of length 1."""
    first, end = _chunk_of_program(starts, num_seqs, MOST, CHUNK, SEQUENCES)
    if first >= end:
        return
    head, row = tl.program_id(1), tl.arange(0, CHUNK)
    token, channel = first + row, tl.arange(0, CHANNELS)
    exists = token < end
    of_keys = KEY_HEADS * KEY_DIM
    rows = mixed + token[:, None] * (2 * of_keys + HEADS * VALUE_DIM) + channel[None, :]
    rows_of_keys = rows + of_keys + head // (HEADS // KEY_HEADS) * KEY_DIM
    products, squares = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for start in range(0, KEY_DIM, CHANNELS):
        mask = exists[:, None] & (start + channel < KEY_DIM)[None, :]
        keys = tl.load(rows_of_keys + start, mask=mask, other=0.0)
        products = tl.dot(keys, tl.trans(keys), products, input_precision=PRECISION)
        squares += tl.sum(keys.to(tl.float32) * keys.to(tl.float32), 1)
    length = tl.rsqrt(squares + 1e-6)
    factor = tl.load(factors + token * HEADS + head, mask=exists, other=1.0)
    total = tl.cumsum(tl.log(tl.maximum(factor, 1.1754943508222875e-38)), 0)
    strength = tl.load(strengths + token * HEADS + head, mask=exists, other=0.0)
    tl.store(totals + token * HEADS + head, total, mask=exists)
    tl.store(lengths + token * HEADS + head, length, mask=exists)
    system = products * _weights_between(total, CHUNK) * (strength * length)[:, None] * length[None, :]
    inverse = (row[:, None] == row[None, :]).to(tl.float32)
    size = 1
    while size < CHUNK:  # of blocks on the diagonal, which are inverted: two become one
        block = row // size
        below = (block[:, None] == block[None, :] + 1) & (block % 2 == 1)[:, None]
        left = tl.dot(inverse, tl.where(below, system, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
        size *= 2
    inverse *= strength[None, :]
    for start in range(0, VALUE_DIM, CHANNELS):
        mask = exists[:, None] & (start + channel < VALUE_DIM)[None, :]
        values = tl.load(rows + 2 * of_keys + head * VALUE_DIM + start, mask=mask, other=0.0).to(tl.float32)
        places = u + (token * HEADS + head)[:, None] * VALUE_DIM + start + channel[None, :]
        tl.store(places, tl.dot(inverse, values, input_precision=PRECISION), mask=mask)
    inverse *= (tl.exp(total) * length)[None, :]
    for start in range(0, KEY_DIM, CHANNELS):
        mask = exists[:, None] & (start + channel < KEY_DIM)[None, :]
        keys = tl.load(rows_of_keys + start, mask=mask, other=0.0).to(tl.float32)
        places = w + (token * HEADS + head)[:, None] * KEY_DIM + start + channel[None, :]
        tl.store(places, tl.dot(inverse, keys, input_precision=PRECISION), mask=mask)


@triton.jit
def _carry_states(
    before,
    u,
    w,
    totals,
    lengths,
    mixed,
    states,
    starts,
    slots,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of the state of one head of a sequence, chunk by chunk: kept as they are before each one. `u`
    becomes the changes."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    if end - begin <= MOST:
        return
    index, column = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, is_key, is_column = tl.arange(0, CHUNK), index < KEY_DIM, column < VALUE_DIM
    of_keys = KEY_HEADS * KEY_DIM
    inside, mask = index[:, None] * VALUE_DIM + column[None, :], is_key[:, None] & is_column[None, :]
    own = states + (tl.load(slots + sequence).to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM + inside
    state = tl.load(own, mask=mask, other=0.0)
    before += ((begin // CHUNK + sequence) * HEADS + head) * KEY_DIM * VALUE_DIM + inside
    for chunk in range(begin, end, CHUNK):
        tl.store(before, state.to(before.dtype.element_ty), mask=mask)
        before += HEADS * KEY_DIM * VALUE_DIM
        token = chunk + row
        exists = token < end
        place = token * HEADS + head
        weights = tl.load(
            w + place[:, None] * KEY_DIM + index[None, :], mask=exists[:, None] & is_key[None, :], other=0.0
        )
        places = u + place[:, None] * VALUE_DIM + column[None, :]
        changes = tl.load(places, mask=exists[:, None] & is_column[None, :], other=0.0)
        changes -= tl.dot(weights, state, input_precision=PRECISION)
        tl.store(places, changes, mask=exists[:, None] & is_column[None, :])
        total = tl.load(totals + place, mask=exists, other=0.0)
        whole = tl.load(totals + (tl.minimum(chunk + CHUNK, end) - 1) * HEADS + head)
        left = tl.exp(whole - total) * tl.load(lengths + place, mask=exists, other=0.0)
        first = of_keys + head // (HEADS // KEY_HEADS) * KEY_DIM
        keys = tl.load(
            mixed + token[None, :] * (2 * of_keys + HEADS * VALUE_DIM) + first + index[:, None],
            mask=exists[None, :] & is_key[:, None],
            other=0.0,
        ).to(tl.float32)
        state = tl.dot(keys, changes * left[:, None], state * tl.exp(whole), input_precision=PRECISION)
    tl.store(own, state, mask=mask)


@triton.jit(do_not_specialize=["num_seqs"])
def _read_states(
    out,
    before,
    changes,
    totals,
    lengths,
    mixed,
    starts,
    num_seqs,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of what the tokens of a chunk and a head read."""
    first, end = _chunk_of_program(starts, num_seqs, MOST, CHUNK, SEQUENCES)
    if first >= end:
        return
    head, row = tl.program_id(1), tl.arange(0, CHUNK)
    token, channel = first + row, tl.arange(0, CHANNELS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    exists, is_column = token < end, column < VALUE_DIM
    of_keys = KEY_HEADS * KEY_DIM
    rows = mixed + token[:, None] * (2 * of_keys + HEADS * VALUE_DIM) + channel[None, :]
    rows += head // (HEADS // KEY_HEADS) * KEY_DIM
    before += (tl.program_id(0).to(tl.int64) * HEADS + head) * KEY_DIM * VALUE_DIM
    sums, squares = tl.zeros((CHUNK, COLUMNS), tl.float32), tl.zeros((CHUNK,), tl.float32)
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, KEY_DIM, CHANNELS):
        is_key = start + channel < KEY_DIM
        mask = exists[:, None] & is_key[None, :]
        queries = tl.load(rows + start, mask=mask, other=0.0)
        keys = tl.load(rows + of_keys + start, mask=mask, other=0.0)
        state = tl.load(
            before + (start + channel)[:, None] * VALUE_DIM + column[None, :],
            mask=is_key[:, None] & is_column[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
        sums = tl.dot(queries, state, sums, input_precision=PRECISION)
        squares += tl.sum(queries.to(tl.float32) * queries.to(tl.float32), 1)
    place = token * HEADS + head
    total = tl.load(totals + place, mask=exists, other=0.0)
    length = tl.load(lengths + place, mask=exists, other=0.0)
    scores *= _weights_between(total, CHUNK) * length[None, :]
    mask = exists[:, None] & is_column[None, :]
    places = place[:, None] * VALUE_DIM + column[None, :]
    changed = tl.load(changes + places, mask=mask, other=0.0)
    sums = tl.dot(scores, changed, sums * tl.exp(total)[:, None], input_precision=PRECISION)
    sums *= (tl.rsqrt(squares + 1e-6) * scale)[:, None]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=mask)


def change_by_chunks(
    out: torch.Tensor,
    mixed: torch.Tensor,
    factors: torch.Tensor,
    strengths: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    sizes: dict[str, int],
) -> None:
    """As `gated_delta_rule`, for sequences of more than FEW tokens."""
    (num_tokens, heads, value_dim), key_dim, num_seqs = out.shape, states.shape[2], len(slots)
    chunks = num_tokens // _CHUNK + num_seqs

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=mixed.device)

    w, u = (empty(num_tokens, heads, dim) for dim in (key_dim, value_dim))
    totals, lengths = empty(num_tokens, heads), empty(num_tokens, heads)
    before = empty(chunks, heads, key_dim, value_dim, dtype=mixed.dtype)
    precision = "tf32x3" if mixed.dtype == torch.float32 else "tf32"
    shape: dict[str, Any] = {**sizes, "CHUNK": _CHUNK, "MOST": FEW, "PRECISION": precision}
    of_chunks = shape | {"CHANNELS": _CHANNELS, "SEQUENCES": _SEQUENCES}
    _solve_chunks[(chunks, heads)](w, u, totals, lengths, mixed, factors, strengths, starts, num_seqs, **of_chunks)
    _carry_states[(triton.cdiv(value_dim, _COLUMNS_OF_STATE), heads, num_seqs)](
        before,
        u,
        w,
        totals,
        lengths,
        mixed,
        states,
        starts,
        slots,
        KEYS=max(16, triton.next_power_of_2(key_dim)),
        COLUMNS=_COLUMNS_OF_STATE,
        **shape,
    )
    _read_states[(chunks, heads, triton.cdiv(value_dim, _COLUMNS))](
        out, before, u, totals, lengths, mixed, starts, num_seqs, key_dim**-0.5, COLUMNS=_COLUMNS, **of_chunks
    )
