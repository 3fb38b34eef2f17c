"""Kara: score the KV pairs of a window by the attention of all of its queries, keep the best tokens and chunks."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, batched_attention_mass
from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import check_queries, everything, keeps_everything


def select(
    queries: Tensor,
    keys: Keys,
    *,
    retain: int,
    buffer: int,
    chunk_budget: int,
    max_chunk: int,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a window to keep, per sequence and KV head (Kara paper, section 4.1).

    Args:
        queries: `[S, Hq, query tokens, d]`, rotated; normally those of all W positions. Passing only the buffer's
            is the ablation without bidirectional attention, passing every s-th one costs an s-th.
        keys: `[S, Hkv, W, d]`, rotated; query head h reads KV head `h // (Hq // Hkv)`.
        retain: KV pairs kept of the W, buffer included; everything is kept if `retain >= W`.
        buffer: the last positions of the window, always kept and never scored.
        chunk_budget: how many of the kept KV pairs Token2Chunk may spend (alpha); 0 keeps the plain top scores.
        max_chunk: longest chunk, both ends counted (gamma).
        softmax: of the layer.

    Returns:
        int64 `[S, Hkv, min(retain, W)]`: ascending positions in the window.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    found = scores(queries, keys, buffer, softmax)
    return choose(found, retain=retain, buffer=buffer, chunk_budget=chunk_budget, max_chunk=max_chunk)


def select_tokens(queries: Tensor, keys: Keys, *, retain: int, buffer: int, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """The ablation without Token2Chunk: `select` with all of the budget for the best tokens."""
    return select(queries, keys, retain=retain, buffer=buffer, chunk_budget=0, max_chunk=3, softmax=softmax)


@torch.no_grad()
def scores(queries: Tensor, keys: Keys, buffer: int, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """Attention mass each compressible position receives (Kara paper, Eq. 4).

    Every query attends to the first n = W - buffer keys and only to these, later ones included (no causal mask).
    The probabilities are summed over the query tokens and over the query heads of a KV head, so that each row of
    the result sums to `query tokens * Hq / Hkv`.

    Args:
        queries: `[S, Hq, query tokens, d]` and
        keys: `[S, Hkv, W, d]`, bfloat16 or float32; computed in float32 throughout.

    Returns:
        float32 `[S, Hkv, W - buffer]`, bit-identical for a sequence whatever the others in the batch are.
    """
    check_queries(queries, keys)
    window = keys.shape[2]
    if not 0 <= buffer < window:
        raise ValueError(f"buffer={buffer} must leave at least one of the {window} positions of the window to score")
    return batched_attention_mass(queries, keys, window - buffer, softmax=softmax)


def budget(num_scored: int, retention: Fraction | str | int, chunk_budget: int) -> tuple[int, int]:
    """How many of `num_scored` positions are kept, and how many of these are candidates (Kara paper, Eq. 5).

    `retention` is exact, like "0.07" or "225/736": in floating point, 0.07 * 100 rounds up to 8 kept positions.
    """
    if isinstance(retention, float) or not 0 <= Fraction(retention) <= 1:
        raise ValueError(f"retention={retention!r} must be a string, a Fraction or an integer between 0 and 1")
    total = math.ceil(Fraction(retention) * num_scored)
    return total, max(total - chunk_budget, 0)
