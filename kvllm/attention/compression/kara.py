"""Kara: score the pairs of a window by the attention of all of its queries, keep the best tokens and chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor

from kvllm.attention.compression.token2chunk import expand

# Attention probabilities of one KV head that are alive at a time. On a CPU the tiles of all heads should stay in
# the cache, on a GPU there should be few of them. It must not depend on the number of heads or sequences: they
# would change the order of summation.
_CPU_TILE_BYTES = 1 << 18
_GPU_TILE_BYTES = 1 << 24


def select(queries: Tensor, keys: Tensor, *, retain: int, buffer: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """Choose the pairs of a window to keep, per sequence and KV head (Kara paper, section 4.1).

    Args:
        queries: `[S, Hq, rows, d]`, rotated; normally those of all W positions. Passing only the buffer's is the
            ablation without bidirectional attention, passing every s-th one costs an s-th.
        keys: `[S, Hkv, W, d]`, rotated; query head h reads KV head `h // (Hq // Hkv)`.
        retain: pairs kept of the W, buffer included; everything is kept if `retain >= W`.
        buffer: the last positions of the window, always kept and never scored.
        chunk_budget: how many of the kept pairs Token2Chunk may spend (alpha); 0 keeps the plain top scores.
        max_chunk: longest chunk, both ends counted (gamma).

    Returns:
        int64 `[S, Hkv, min(retain, W)]`: ascending positions in the window.
    """
    num_seqs, num_kv_heads, window, _ = keys.shape
    if not 0 <= buffer <= min(retain, window):
        raise ValueError(f"buffer={buffer} must be between 0 and retain={retain} and the window of {window} positions")
    positions = torch.arange(window, device=keys.device).expand(num_seqs, num_kv_heads, window)
    if retain >= window:
        return positions.contiguous()
    kept = expand(scores(queries, keys, buffer), retain - buffer, chunk_budget, max_chunk)
    return torch.cat((kept, positions[..., window - buffer :]), dim=-1)


@torch.no_grad()
def scores(queries: Tensor, keys: Tensor, buffer: int) -> Tensor:
    """Attention mass each compressible position receives (Kara paper, Eq. 4).

    Every query attends to the first n = W - buffer keys and only to these, later ones included (no causal mask).
    The probabilities are summed over the query rows and over the query heads of a KV head, so that each row of the
    result sums to `rows * Hq / Hkv`.

    Args:
        queries: `[S, Hq, rows, d]` and
        keys: `[S, Hkv, W, d]`, bfloat16 or float32; computed in float32 throughout.

    Returns:
        float32 `[S, Hkv, W - buffer]`, bit-identical for a sequence whatever the others in the batch are.
    """
    num_seqs, num_heads, num_rows, head_dim = queries.shape
    _, num_kv_heads, window, _ = keys.shape
    if num_heads % num_kv_heads or keys.shape[0] != num_seqs or keys.shape[3] != head_dim or num_rows == 0:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} must be [S, Hq, rows, d] and [S, Hkv, W, d] "
            "with at least one row and Hq a multiple of Hkv"
        )
    if not 0 <= buffer < window:
        raise ValueError(f"buffer={buffer} must leave at least one of the {window} positions of the window to score")
    num_scored = window - buffer
    tile_bytes = _CPU_TILE_BYTES if keys.device.type == "cpu" else _GPU_TILE_BYTES
    tile_rows = max(1, tile_bytes // (4 * num_scored))
    mass = torch.zeros(num_seqs, num_kv_heads, num_scored, device=keys.device)
    with _no_tf32():
        # One sequence at a time: a batched product may choose its order of summation by the size of the batch.
        for seq_queries, seq_keys, seq_mass in zip(queries, keys, mass, strict=True):
            rows = seq_queries.float().contiguous().view(num_kv_heads, -1, head_dim)
            scaled_keys = (seq_keys[:, :num_scored].float() * head_dim**-0.5).contiguous()
            for tile in rows.split(tile_rows, dim=1):
                logits = torch.bmm(tile, scaled_keys.mT)
                seq_mass += torch.softmax(logits, dim=-1, out=logits).sum(dim=1)
    return mass


def budget(num_scored: int, retention: Fraction | str | int, chunk_budget: int) -> tuple[int, int]:
    """How many of `num_scored` positions are kept, and how many of these are candidates (Kara paper, Eq. 5).

    `retention` is exact, like "0.07" or "225/736": in floating point, 0.07 * 100 rounds up to 8 kept positions.
    """
    if isinstance(retention, float) or not 0 <= Fraction(retention) <= 1:
        raise ValueError(f"retention={retention!r} must be a string, a Fraction or an integer between 0 and 1")
    total = math.ceil(Fraction(retention) * num_scored)
    return total, max(total - chunk_budget, 0)


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Products in full float32, whatever the process allows: TF32 keeps 10 bits, and close scores would swap places."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = precision
